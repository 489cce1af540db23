"""The rate of a counter over its last seconds, for what a node reports of itself."""

from __future__ import annotations

from collections import deque

MARK_S = 1.0
"""Minimum seconds between two counts that are kept."""


class RecentRate:
    """Measures the rate of a count that was 0 at `now`, in seconds of any clock.

    A caller that asks less often than once per `window_s` gets the rate over a longer window.
    """

    def __init__(self, now: float, window_s: float) -> None:
        self._window_s = window_s
        self._marks = deque([(now, 0)])

    def per_s(self, count: int, now: float) -> float:
        """Return the rate over the last `window_s`, or since the beginning if that is shorter."""
        while len(self._marks) > 1 and self._marks[1][0] <= now - self._window_s:
            self._marks.popleft()
        since, before = self._marks[0]
        if now - self._marks[-1][0] >= MARK_S:
            self._marks.append((now, count))
        return max(0.0, (count - before) / (now - since)) if now > since else 0.0
