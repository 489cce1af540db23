"""What was told to the history and is not written yet: bounded, filled from the event loop, emptied by the writer.

Samples and looks at who is there come every few seconds and the newest makes up for those before; committed steps,
refusals and happenings come once. So they wait apart, and where the database is slow the oldest of their kind go.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from swarm_node.dashboard.history.facts import Sample, Step
from swarm_node.dashboard.views import Happening, RefusalView

MAX_OFTEN = 1000
MAX_ONCE = 10_000
BATCH = 500


@dataclass(frozen=True, slots=True)
class Look:
    """Everyone who is there at `at`."""

    at: float
    peer_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Samples:
    at: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    run: str
    refusal: RefusalView


Fact = Look | Samples | Step | Refused | Happening


class Inbox:
    """Safe from any thread. `take` is the writer's; what it gave is `put_back` or not, then `done`."""

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
        """What could not be written, before all else."""
        with self._changed:
            newer = [*self._often, *self._once]
            self._often.clear()
            self._once.clear()
            for fact in [*facts, *newer]:
                self._add(fact)

    def take(self, wait_s: float) -> list[Fact]:
        """At most a batch of each kind; empty if there is nothing after `wait_s`."""
        with self._changed:
            if not len(self) and not self.is_closed:
                self._changed.wait(wait_s)
            waiting = (self._once, self._often)
            taken = [queue.popleft() for queue in waiting for _ in range(min(len(queue), BATCH))]
            self._num_taken = len(taken)
            return taken

    def done(self) -> None:
        """With what was taken."""
        with self._changed:
            self._num_taken = 0
            self._changed.notify_all()

    def drop(self, count: int) -> None:
        with self._changed:
            self.num_dropped += count

    def pause(self, wait_s: float) -> None:
        """Until closed, or for `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed, wait_s)

    def wait_empty(self, wait_s: float) -> bool:
        """Whether all that was put is written, or given up."""
        with self._changed:
            return self._changed.wait_for(lambda: not len(self) and not self._num_taken, wait_s)

    def close(self) -> None:
        """From now on nothing waits."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def _add(self, fact: Fact) -> None:
        queue, limit = (self._often, MAX_OFTEN) if isinstance(fact, Look | Samples) else (self._once, MAX_ONCE)
        queue.append(fact)
        if len(queue) > limit:
            queue.popleft()
            self.num_dropped += 1
