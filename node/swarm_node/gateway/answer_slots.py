"""Bounds the answers that a gateway runs at once, so that neither a model nor a caller keeps the others out."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarm.held_counts import HeldCounts
from swarm.router.revisions import split_pin

from swarm_node.gateway import http_limits
from swarm_node.http.http_error import HttpError


class AnswerSlots:
    """Counts running answers by model and by caller. Each choice is one. Owned by the gateway's event loop.

    An answer also holds a slot while it waits for room at its model's servers. So a model may hold half of the slots
    that other models leave: `capacity` while it is the only one, half as many beside a model that has these (Choudhury
    and Hahne 1998, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches). One caller can hold these for as
    long as an answer may run. So a quarter as many more, which models share in the same way, are for callers that have
    a sixteenth of `capacity` at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._of_callers = HeldCounts[Hashable]()
        self._for_all, self._for_few = _ModelSlots(2 * capacity), _ModelSlots(capacity // 2)

    @property
    def num_running(self) -> int:
        return self._of_callers.total()

    @contextmanager
    def take(self, num: int, model: str, caller: Hashable) -> Iterator[None]:
        """Hold `num` slots of the model for `caller`. Raises HttpError 429 at once if fewer are free."""
        name, _ = split_pin(model)
        has_few = self._of_callers[caller] + num <= self._capacity // 16
        slots = self._for_few if has_few and not self._for_all.has_room(num, name) else self._for_all
        if not slots.has_room(num, name):
            num_own = self._for_all.running[name] + self._for_few.running[name]
            raise HttpError(
                429,
                f"the gateway runs at most {self._capacity} answers of a model at once, and fewer while those of other "
                f"models run: {num_own} of this model and {self.num_running - num_own} of others run now",
                code="rate_limit_exceeded",
                retry_after_s=http_limits.RETRY_AFTER_S,
            )
        with slots.running.holding(name, num), self._of_callers.holding(caller, num):
            yield


@dataclass(slots=True)
class _ModelSlots:
    """Slots that models share. `running` counts the answers of each."""

    size: int
    running: HeldCounts[str] = field(default_factory=HeldCounts)

    def has_room(self, num: int, model: str) -> bool:
        num_own = self.running[model]
        return 2 * (num_own + num) <= self.size - (self.running.total() - num_own)
