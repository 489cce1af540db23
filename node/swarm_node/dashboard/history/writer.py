"""The thread that writes the history, its queue, and what it does when the database fails.

Samples and records of who is there come every few seconds and the newest makes up for those before; committed steps,
refusals and changes come once. So they wait apart, and where the database is slow the oldest of their kind go.

A database that fails is tried again for `patience_s`; then the history goes on in memory, begun with a copy of what
was there, and every `again_s` the database is opened anew. Once it takes what it missed, the memory is let go.
The thread owns the open store; readers use `store` as it is at that moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm_node.dashboard.history.facts import Fact, HistoryError, PresenceFact, SamplesFact
from swarm_node.dashboard.history.recorder import FactRecorder
from swarm_node.dashboard.history.retention import Retention, RetentionLimits
from swarm_node.dashboard.history.store import Store, is_damage, open_memory, open_store, reason

logger = logging.getLogger(__name__)

_IDLE_S = 1.0
MAX_OFTEN = 1000
MAX_ONCE = 10_000
BATCH = 500


class WriteQueue:
    """Facts that wait to be written. Safe from any thread.

    Only the writer calls `take`; what it returned is `put_back` or not, then `done`.
    """

    def __init__(self) -> None:
        self._often: deque[Fact] = deque()
        self._once: deque[Fact] = deque()
        self._changed = threading.Condition()
        self._num_taken = 0
        self.is_closed = False
        self.num_dropped = 0

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
        """Take at most a batch of each kind; empty if there is nothing after `wait_s`."""
        with self._changed:
            if not len(self) and not self.is_closed:
                self._changed.wait(wait_s)
            waiting = (self._once, self._often)
            taken = [queue.popleft() for queue in waiting for _ in range(min(len(queue), BATCH))]
            self._num_taken = len(taken)
            return taken

    def done(self) -> None:
        """Report that what was taken is written or put back."""
        with self._changed:
            self._num_taken = 0
            self._changed.notify_all()

    def drop(self, count: int) -> None:
        with self._changed:
            self.num_dropped += count

    def pause(self, wait_s: float) -> None:
        """Wait until closed, at most `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed, wait_s)

    def wait_empty(self, wait_s: float) -> bool:
        """Wait at most `wait_s`; return whether all that was put is written, or given up."""
        with self._changed:
            return self._changed.wait_for(lambda: not len(self) and not self._num_taken, wait_s)

    def close(self) -> None:
        """End all waits, also future ones."""
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
            self.num_dropped += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterTiming:
    """Seconds until the history goes to memory, and between writes, attempts to open, and retention."""

    patience_s: float = 30.0
    retry_s: float = 1.0
    again_s: float = 15.0
    tidy_s: float = 60.0


class HistoryWriter:
    """`warn` is called in the writer's thread. Others use only `queue`, `suspect` and the attributes."""

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
        self.is_open = threading.Event()
        self._place = place
        self._limits = limits
        self._timing = timing
        self._clock = clock
        self._warn = warn
        self._recorder = FactRecorder(limits)
        self._missed = WriteQueue()  # by the database, while the history is in memory
        self._failing_since: float | None = None
        self._again_at = 0.0
        self._suspicion: HistoryError | None = None
        self._retention: Retention | None = None
        self._tidying: Iterator[None] | None = None
        self._tidy_at = 0.0
        self._thread = threading.Thread(target=self._run, name="history-write", daemon=True)

    @property
    def num_dropped(self) -> int:
        return self.queue.num_dropped + self._missed.num_dropped

    @property
    def squeeze(self) -> int:
        """Return how often all ages are halved now."""
        return self._retention.squeeze if self._retention is not None else 0

    def start(self) -> None:
        self._thread.start()

    def close(self, wait_s: float) -> bool:
        """Write what is waiting and end. Returns False if the database blocks the thread, which is left behind."""
        self.queue.close()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def suspect(self, problem: HistoryError) -> None:
        """Report that a read found the file damaged."""
        self._suspicion = problem

    def _run(self) -> None:
        try:
            self._use(self._opened())
        except HistoryError as error:
            self._go_to_memory(error)
        self.is_open.set()
        while not self.queue.is_closed or len(self.queue):
            self._turn()
        if self.problem is not None:
            self._try_again()
        assert self.store is not None
        self.store.close()

    def _turn(self) -> None:
        facts = self.queue.take(0.0 if self._tidying else _IDLE_S)
        try:
            self._write(facts)
            self._failing_since = None
            facts = []
            self._tidy()
        except Exception as error:
            self._failed(error, facts)
        finally:
            self.queue.done()
        if self.problem is not None and time.monotonic() >= self._again_at:
            self._try_again()

    def _write(self, facts: Sequence[Fact]) -> None:
        """Write `facts`; one that no database takes is dropped. Raises what a failing database raises."""
        assert self.store is not None
        try:
            self._commit(self.store, self._recorder, facts)
        except Exception as error:
            if reason(error, self.store.place) is not None:
                raise
            if len(facts) > 1:
                for fact in facts:
                    self._write([fact])
                return
            logger.warning("a fact was not written to the history: %s: %s", type(error).__name__, error)
            self.queue.drop(len(facts))
            return
        if self.problem is not None:
            for fact in facts:
                self._missed.put(fact)

    def _commit(self, store: Store, recorder: FactRecorder, facts: Sequence[Fact]) -> None:
        if not facts:
            return
        try:
            with store.writing() as connection:
                num_dropped = recorder.write(connection, facts)
        except BaseException:
            recorder.forget()
            raise
        self.queue.drop(num_dropped)

    def _tidy(self) -> None:
        """Make one step of retention, if it is time. Raises for a file that is damaged or gone."""
        assert self.store is not None
        assert self._retention is not None
        if self._suspicion is not None:
            raise self._suspicion
        if self._tidying is None and time.monotonic() >= self._tidy_at:
            self.store.check_place()
            self._tidying = self._retention.tidy(self._clock())
            self._tidy_at = time.monotonic() + self._timing.tidy_s
        if self._tidying is not None and next(self._tidying, self) is self:
            self._tidying = None

    def _failed(self, error: Exception, unwritten: Sequence[Fact]) -> None:
        self._tidying = None
        self._suspicion = None
        known = reason(error, str(self._place))
        if known is None or self.problem is not None:
            logger.warning("the history was not tidied: %s: %s", type(error).__name__, error)
            return
        self.queue.put_back(unwritten)
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        is_lasting = is_damage(error) or isinstance(error, HistoryError)
        if is_lasting or self.queue.is_closed or now - self._failing_since >= self._timing.patience_s:
            self._go_to_memory(known, is_damaged=is_damage(error))
        else:
            self.queue.pause(self._timing.retry_s)

    def _go_to_memory(self, problem: HistoryError, *, is_damaged: bool = False) -> None:
        failing = self.store
        self._use(open_memory(None if is_damaged else failing))
        if failing is not None:
            failing.close()
        self.problem = problem
        self._again_at = time.monotonic() + (0.0 if is_damaged else self._timing.again_s)
        self._warn(problem)

    def _try_again(self) -> None:
        """Write what the database missed into it, or stay in memory for a while longer."""
        memory, recorder, facts = self.store, FactRecorder(self._limits), list[Fact]()
        try:
            store = self._opened()
            try:
                while facts := self._missed.take(0.0):
                    self._commit(store, recorder, facts)
            except BaseException:
                store.close()
                raise
        except Exception as error:
            self._missed.put_back(facts)
            self._again_at = time.monotonic() + self._timing.again_s
            logger.debug("the history stays in memory: %s", error)
            return
        self._use(store)
        self.problem = None
        if memory is not None:
            memory.close()
        logger.warning("the history is in %s again", store.place)

    def _opened(self) -> Store:
        store, news = open_store(self._place)
        if news is not None:
            self._warn(news)
        return store

    def _use(self, store: Store) -> None:
        self._recorder = FactRecorder(self._limits)
        self._retention = Retention(store, self._limits)
        self._tidying = None
        self._failing_since = None
        self.store = store
