"""How fast a count has grown of late: what a server's record says of the tokens it computes. Not for several tasks."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
MARK_S = 1.0
"""Between two looks that are remembered."""


class RecentRate:
    """Of a count that was 0 at `now`, in seconds of any clock. Who looks less often than each WINDOW_S sees further
    back."""

    def __init__(self, now: float) -> None:
        self._marks = deque([(now, 0)])

    def per_s(self, count: int, now: float) -> float:
        """Over the last WINDOW_S, or since the beginning where that is less. `count` is what it has come to."""
        while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_S:
            self._marks.popleft()
        since, before = self._marks[0]
        if now - self._marks[-1][0] >= MARK_S:
            self._marks.append((now, count))
        return max(0.0, (count - before) / (now - since)) if now > since else 0.0
