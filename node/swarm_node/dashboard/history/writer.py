"""The thread that writes the history, its queue, and what happens when the database fails.

There are two queues. Samples and records of presence come every few seconds, and newer ones make up for lost ones.
Committed steps, refusals and changes come only once. If the database is slow or away, each queue drops its oldest
facts.

Facts that could not be written wait and are retried. `problem` says why, once a failure lasts. Meanwhile, a database
that is still readable serves reads, and one that is not is reopened. The thread owns the open store; readers use the
current `store`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm_node.dashboard.history.recorder import Fact, FactRecorder, PresenceFact, SamplesFact
from swarm_node.dashboard.history.retention import Retention, RetentionLimits
from swarm_node.dashboard.history.store import HistoryError, Store, is_damage, open_store, reason
from swarm_node.formatting import duration

logger = logging.getLogger(__name__)

_IDLE_S = 1.0
MAX_OFTEN = 1000
MAX_ONCE = 10_000
BATCH = 500


class WriteQueue:
    """Facts that wait to be written. Thread-safe.

    Only the writer calls `take`. It then calls `put_back` for facts that it could not write, and `done`.
    """

    def __init__(self) -> None:
        self._often: deque[Fact] = deque()
        self._once: deque[Fact] = deque()
        self._changed = threading.Condition()
        self._num_taken = 0
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._often) + len(self._once)

    def put(self, fact: Fact) -> None:
        with self._changed:
            self._add(fact)
            self._changed.notify_all()

    def put_back(self, facts: Iterable[Fact]) -> None:
        """Put facts that could not be written before all others."""
        with self._changed:
            newer = [*self._often, *self._once]
            self._often.clear()
            self._once.clear()
            for fact in [*facts, *newer]:
                self._add(fact)

    def take(self, wait_s: float) -> list[Fact]:
        """Take at most a batch of each kind. The result is empty if nothing came within `wait_s`."""
        with self._changed:
            if not len(self) and not self.is_closed:
                self._changed.wait(wait_s)
            waiting = (self._once, self._often)
            taken = [queue.popleft() for queue in waiting for _ in range(min(len(queue), BATCH))]
            self._num_taken = len(taken)
            return taken

    def done(self) -> None:
        """Report that the facts taken were written or put back."""
        with self._changed:
            self._num_taken = 0
            self._changed.notify_all()

    def pause(self, wait_s: float) -> None:
        """Wait at most `wait_s`, or until the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed, wait_s)

    def wait_empty(self, wait_s: float) -> bool:
        """Wait at most `wait_s`. Return whether everything was written or dropped."""
        with self._changed:
            return self._changed.wait_for(lambda: not len(self) and not self._num_taken, wait_s)

    def close(self) -> None:
        """End all waits, including future ones."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def _add(self, fact: Fact) -> None:
        queue, limit = (
            (self._often, MAX_OFTEN) if isinstance(fact, PresenceFact | SamplesFact) else (self._once, MAX_ONCE)
        )
        queue.append(fact)
        if len(queue) > limit:
            queue.popleft()


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterTiming:
    """Times in seconds: `patience_s` until a failure is reported, `retry_s` and `again_s` between attempts before and
    after the report, and `tidy_s` between passes of retention."""

    patience_s: float = 30.0
    retry_s: float = 1.0
    again_s: float = 15.0
    tidy_s: float = 60.0


class HistoryWriter:
    """Writes the queued facts in a thread of its own, which calls `warn`. Other threads use only `queue`, `suspect` and
    the attributes."""

    def __init__(
        self,
        place: Path | str,
        *,
        limits: RetentionLimits,
        timing: WriterTiming,
        clock: Callable[[], float],
        warn: Callable[[HistoryError], None],
    ) -> None:
        self.queue = WriteQueue()
        self.store: Store | None = None
        self.problem: HistoryError | None = None
        self.was_tried = threading.Event()
        """Set once the database is open, or the first attempt to open it failed."""
        self._place = place
        self._limits = limits
        self._timing = timing
        self._clock = clock
        self._warn = warn
        self._recorder = FactRecorder(limits)
        self._failing_since: float | None = None
        self._suspicion: HistoryError | None = None
        self._retention: Retention | None = None
        self._tidying: Iterator[None] | None = None
        self._tidy_at = 0.0
        self._thread = threading.Thread(target=self._run, name="history-write", daemon=True)

    @property
    def squeeze(self) -> int:
        """Return how often all ages are currently halved."""
        return self._retention.squeeze if self._retention is not None else 0

    def start(self) -> None:
        self._thread.start()

    def close(self, wait_s: float) -> bool:
        """Write what waits, and end. Return False if the database blocks the thread, which then keeps running."""
        self.queue.close()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def suspect(self, problem: HistoryError) -> None:
        """Report that a read found the file damaged."""
        self._suspicion = problem

    def _run(self) -> None:
        while not self.queue.is_closed:
            self._turn()
        while len(self.queue) and self._turn():
            pass
        self._release()

    def _turn(self) -> bool:
        """Write what waits, and tidy. Return whether the database accepted the facts."""
        facts: list[Fact] = []
        try:
            store = self.store or self._open()
            self.was_tried.set()
            facts = self.queue.take(0.0 if self._tidying else _IDLE_S)
            self._write(store, facts)
            facts = []
            self._works(store)
            self._tidy(store)
        except Exception as error:
            self._failed(error, facts)
            return False
        finally:
            self.queue.done()
        return True

    def _works(self, store: Store) -> None:
        """Report that the database accepts writes again, if an earlier warning said that it does not."""
        if self.problem is not None and self._failing_since is not None:
            lost = duration(time.monotonic() - self._failing_since)
            self._warn(HistoryError(f"the history in {store.place} works again; it could not be used for {lost}"))
        self._failing_since = self.problem = None

    def _open(self) -> Store:
        """Open the store. Raises HistoryError."""
        self.store, news = open_store(self._place)
        self._recorder.forget()
        self._retention = Retention(self.store, self._limits)
        if news is not None:
            self._warn(news)
        return self.store

    def _release(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = self._retention = None

    def _write(self, store: Store, facts: Sequence[Fact]) -> None:
        """Write `facts`. A fact that the database rejects is dropped. Raises what a failing database raises."""
        if not facts:
            return
        try:
            with store.writing() as connection:
                self._recorder.write(connection, facts)
        except Exception as error:
            self._recorder.forget()
            if reason(error, store.place) is not None:
                raise
            if len(facts) == 1:
                logger.warning("a fact was not written to the history: %s: %s", type(error).__name__, error)
            else:
                for fact in facts:
                    self._write(store, [fact])

    def _tidy(self, store: Store) -> None:
        """Make one step of retention if it is due. Raises if the file is damaged or gone."""
        assert self._retention is not None
        if self._suspicion is not None:
            raise self._suspicion
        if self._tidying is None and time.monotonic() >= self._tidy_at:
            store.check_place()
            self._tidying = self._retention.tidy(self._clock())
            self._tidy_at = time.monotonic() + self._timing.tidy_s
        if self._tidying is not None and next(self._tidying, self) is self:
            self._tidying = None

    def _failed(self, error: Exception, unwritten: Sequence[Fact]) -> None:
        self._tidying = None
        self._suspicion = None
        known = reason(error, self.store.place if self.store is not None else "")
        if known is None:
            logger.warning("the history was not tidied: %s: %s", type(error).__name__, error)
            return
        self.queue.put_back(unwritten)
        if self.store is not None and (is_damage(error) or isinstance(error, HistoryError)):
            # the file is lost: the next turn opens another one
            self._release()
            self._warn(known)
            return
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if self.store is None or now - self._failing_since >= self._timing.patience_s:
            self._tell(known)
        self.was_tried.set()
        self.queue.pause(self._timing.retry_s if self.problem is None else self._timing.again_s)

    def _tell(self, problem: HistoryError) -> None:
        is_news, self.problem = self.problem is None, problem
        if is_news:
            self._warn(problem)
        if self.store is not None and not self.store.is_readable():
            self._release()
