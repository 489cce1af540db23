"""How long the requests of the last minutes waited for their first token, for the gateway's own record.

State belongs to the gateway's event loop. Bounded: of many requests the newest count.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 300.0
MAX_KEPT = 2000
"""Enough for a 95th percentile; at seven requests a second they are all of the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Seconds from a request's admission to its first token: the median, and what 95 of 100 do not exceed."""

    p50_s: float
    p95_s: float


class FirstTokens:
    """`clock` in seconds, never back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits = deque[tuple[float, float]](maxlen=MAX_KEPT)

    def add(self, seconds: float) -> None:
        """A request has its first token after `seconds`."""
        self._waits.append((self._clock(), seconds))

    def of_late(self) -> FirstToken | None:
        """Of those whose first token came in the last WINDOW_S; None if there were none."""
        since = self._clock() - WINDOW_S
        while self._waits and self._waits[0][0] < since:
            self._waits.popleft()
        waits = sorted(seconds for _, seconds in self._waits)
        return FirstToken(p50_s=_rank(waits, 50), p95_s=_rank(waits, 95)) if waits else None


def _rank(waits: list[float], percent: int) -> float:
    """The nearest-rank percentile: one of the `waits`, which are sorted."""
    return waits[-(-percent * len(waits) // 100) - 1]
