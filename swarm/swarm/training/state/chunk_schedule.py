"""Which chunk of a state to ask which donor for next. Pure: what happened comes in with its time.

Every donor has one chunk under way at first, and then as many as it delivers in a second: a long link is kept full, and
a slow one holds little. At the end, whoever has nothing left to do is asked for what a slower donor still holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm.training.state.manifest import CHUNK_BYTES

AHEAD_S = 1.0
"""Longer than a round trip around the world, and a short wait for what a donor that fails had under way."""
MAX_DONOR_BYTES = 16 << 20
"""What one donor may have under way: 1 Gbit/s at a round trip of 130 ms."""
MAX_BYTES = 64 << 20
"""What all donors together may have under way, and a download take of memory beyond the state."""
ASSUMED_S = 1.0
"""What a chunk takes from a donor that has not delivered any: 1 MiB at 8 Mbit/s."""


class ChunkSchedule:
    """Of the chunks `missing`. A donor that failed is not asked again."""

    def __init__(self, missing: Iterable[int], donors: Sequence[str]) -> None:
        self._waiting = sorted(missing, reverse=True)
        self._asked: dict[int, dict[str, float]] = {}
        self._under_way = dict.fromkeys(donors, 0)
        self._pace_s: dict[str, float] = {}

    @property
    def is_open(self) -> bool:
        """Whether chunks are missing."""
        return bool(self._waiting or self._asked)

    @property
    def num_under_way(self) -> int:
        return sum(self._under_way.values())

    def next(self, now: float) -> tuple[str, int] | None:
        """Ask this donor for that chunk now. None: whoever could give more has enough to do."""
        if self.num_under_way >= MAX_BYTES // CHUNK_BYTES:
            return None
        for donor in sorted(self._under_way, key=lambda donor: (self._under_way[donor], self._pace(donor))):
            if self._under_way[donor] < self._window(donor):
                index = self._waiting.pop() if self._waiting else self._overdue(donor, now)
                if index is not None:
                    self._asked.setdefault(index, {})[donor] = now
                    self._under_way[donor] += 1
                    return donor, index
        return None

    def came(self, donor: str, index: int, now: float) -> None:
        """`donor` delivered. The others that were asked for it are given up: they take that long at least."""
        for asked, asked_at in self._asked.pop(index).items():
            # what is under way from one donor shares its link: so long would one chunk alone have taken
            pace_s = (now - asked_at) / self._under_way[asked]
            self._pace_s[asked] = pace_s if asked == donor else max(pace_s, self._pace_s.get(asked, 0.0))
            self._under_way[asked] -= 1

    def failed(self, donor: str) -> None:
        """`donor` is left out; what only it was asked for waits again."""
        del self._under_way[donor]
        for index, askers in list(self._asked.items()):
            if askers.pop(donor, None) is not None and not askers:
                del self._asked[index]
                self._waiting.append(index)

    def _pace(self, donor: str) -> float:
        return self._pace_s.get(donor, ASSUMED_S)

    def _window(self, donor: str) -> int:
        """In chunks. Of the last ones nobody takes more than a share."""
        fair = 1 + len(self._waiting) // len(self._under_way)
        ahead = int(AHEAD_S / max(self._pace_s[donor], 1e-6)) if donor in self._pace_s else 0
        return min(1 + ahead, MAX_DONOR_BYTES // CHUNK_BYTES, fair)

    def _overdue(self, donor: str, now: float) -> int | None:
        """The chunk that comes latest from those who were asked for it, if it comes from `donor` in half that time."""
        left_s = {index: self._left_s(index, now) for index, askers in self._asked.items() if donor not in askers}
        latest = max(left_s, key=lambda index: left_s[index], default=None)
        return latest if latest is not None and left_s[latest] > 2 * self._pace(donor) else None

    def _left_s(self, index: int, now: float) -> float:
        return min(self._left_of(donor, now - asked_at) for donor, asked_at in self._asked[index].items())

    def _left_of(self, donor: str, waited_s: float) -> float:
        """Until its usual time; after that, as long as it is over its time: silence so far is silence to come."""
        return abs(self._pace_s.get(donor, 0.0) * self._under_way[donor] - waited_s)
