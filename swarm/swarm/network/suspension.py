"""Detects that the machine was suspended, or that its wall clock was set forward.

While a machine is suspended, the clock of its timers stands still and the wall clock goes on. So after an hour no timer
is due, though peers have dropped this node's records, NATs have dropped its mappings, and the machine may be in another
network. A wall clock that a program sets forward looks the same; the checks that follow then do no harm.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SUSPENDED_S = 5.0
"""If the wall clock gains this much on the clock of timers between two calls, the machine was suspended. Programs that
keep a clock right set it in smaller steps."""


class SuspensionWatch:
    def __init__(
        self, wall_clock: Callable[[], float] = time.time, timers_clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall_clock = wall_clock
        self._timers_clock = timers_clock
        self._ahead_s = self._now_ahead_s()

    def was_suspended(self) -> bool:
        """Return whether the machine was suspended since the last call, or since this object was created."""
        before_s, self._ahead_s = self._ahead_s, self._now_ahead_s()
        return self._ahead_s - before_s > SUSPENDED_S

    def _now_ahead_s(self) -> float:
        return self._wall_clock() - self._timers_clock()
