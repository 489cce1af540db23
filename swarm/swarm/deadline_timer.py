"""Waits for the deadlines of one owner, and notices when its own process stood still: then its peers are not late.

A deadline that moves later costs no timer, which matters where each message has one. The timer calls its owner from the
event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

STOPPED_S = 1.0
"""A timer that comes later than this shows that this process was stopped, and not its peers."""

READ_S = 0.5
"""Seconds in which a process that was stopped reads what peers have sent, before it judges them."""


class DeadlineTimer:
    """Calls `tick` once the time has come, and READ_S later if the process was stopped meanwhile. The call may come too
    early."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf
        self._read_until_s = -math.inf

    def set(self, due_s: float) -> None:
        """Call `tick` at `due_s` at the latest, if that is not infinity."""
        due_s = max(due_s, self._read_until_s)
        # a call that comes too early only sets the timer again, which is rarer than a step
        if due_s >= self._due_s or math.isinf(due_s):
            return
        self.cancel()
        self._due_s = due_s
        self._timer = self._loop.call_at(due_s, self._fire)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        now_s, due_s = self._loop.time(), self._due_s
        self._timer, self._due_s = None, math.inf
        if now_s - due_s > STOPPED_S:
            # this process stood still: what its peers sent meanwhile is read first
            self._read_until_s = now_s + READ_S
            self.set(due_s)
        else:
            self._tick()
