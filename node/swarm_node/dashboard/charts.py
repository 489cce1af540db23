"""Computes the geometry of the pages' charts. Templates draw the charts as SVG without text, so that a chart can
stretch to fill its place while its labels remain HTML.

Every chart is 100 wide, and `y` goes from 0 at the top to 100. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from swarm_node.dashboard.views import PresenceView

WIDTH = HEIGHT = 100.0
NUM_TICKS = 4

FLAT = 1e-9
"""Values with a smaller relative difference are drawn as one line, because their labels would be equal."""

TINY = 1e-280
"""Smaller values are drawn as zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line chart. `line`, `area` and `beside` are SVG path data; `beside` is a second line.

    `y_ticks` are evenly spaced values, the highest first.
    """

    line: str
    area: str
    y_ticks: tuple[float, ...]
    beside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarSegment:
    """One piece of a bar, or a column. `kind` is a CSS class."""

    x: float
    width: float
    kind: str
    y: float = 0.0
    height: float = HEIGHT


def curve(
    values: Sequence[float | None],
    *,
    places: Sequence[int] = (),
    from_zero: bool = False,
    beside: Sequence[float | None] = (),
) -> Curve | None:
    """Draw a line through `values`, broken where a value is None. Return None for fewer than two known values.

    The values are evenly spaced, or at increasing `places`. `beside` has other values for the same places. A second
    line connects those that are known.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return None
    all_known = [*known, *(value for value in beside if value is not None and math.isfinite(value))]
    ticks = _ticks(0.0 if from_zero else min(all_known), max(all_known))
    low, high = ticks[-1], ticks[0]
    places = places or range(len(values))
    scale = WIDTH / (places[-1] - places[0])

    def points(numbers: Sequence[float | None]) -> list[str]:
        """Return a point of each number, or "" for one that is unknown."""
        return [
            f"{(place - places[0]) * scale:.2f} {HEIGHT * (high - value) / (high - low):.2f}"
            if value is not None and math.isfinite(value)
            else ""
            for place, value in zip(places, numbers, strict=False)
        ]

    drawn = [list(piece) for is_known, piece in groupby(points(values), bool) if is_known]
    areas = [f"M{_x(piece[0])} {HEIGHT:g}L{'L'.join(piece)}L{_x(piece[-1])} {HEIGHT:g}Z" for piece in drawn]
    others = list(filter(None, points(beside)))
    return Curve(
        line="".join("M" + "L".join(piece) for piece in drawn),
        area="".join(areas),
        y_ticks=ticks,
        beside=f"M{'L'.join(others)}" if len(others) > 1 else "",
    )


def _x(point: str) -> str:
    return point.split(" ", 1)[0]


def _ticks(low: float, high: float) -> tuple[float, ...]:
    """Return NUM_TICKS + 1 round values that enclose both limits, the highest first."""
    largest = max(abs(low), abs(high))
    if largest < TINY:
        low, high = 0.0, 1.0
    elif high - low <= FLAT * largest:
        low, high = low - largest / 2, high + largest / 2
    raw = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0):
        size = factor * power
        bottom = math.floor(low / size + 1e-9) * size
        if bottom + NUM_TICKS * size >= high * (1 - 1e-12):
            return tuple(bottom + i * size for i in reversed(range(NUM_TICKS + 1)))
    return tuple(low + (high - low) * i / NUM_TICKS for i in reversed(range(NUM_TICKS + 1)))


def marks(first: int, last: int, most: int = 4) -> tuple[int, ...]:
    """Return integers from `first` to `last` for evenly spaced labels. In a short range all are exactly even."""
    whole = max(1, last - first)
    even = [steps for steps in range(1, most + 1) if whole % steps == 0]
    # in a long range nobody sees that a label is slightly off
    steps = most if whole > 5 * most else even[-1]
    return tuple(round(first + (last - first) * i / steps) for i in range(steps + 1))


def span(start: int, end: int, num_blocks: int, kind: str) -> BarSegment:
    """Return the segment of blocks `[start, end)`. It stays inside the bar, whatever a record says."""
    scale = WIDTH / max(num_blocks, 1)
    left = min(max(start, 0), num_blocks) * scale
    right = min(max(end, 0), num_blocks) * scale
    return BarSegment(x=left, width=max(right - left, 0.0), kind=kind)


def shares(parts: Iterable[tuple[str, float]]) -> tuple[BarSegment, ...]:
    """Return the parts of a whole, one after the other."""
    known = [(kind, value) for kind, value in parts if math.isfinite(value) and value > 0]
    total = sum(value for _, value in known)
    segments: list[BarSegment] = []
    x = 0.0
    for kind, value in known:
        width = WIDTH * value / total
        segments.append(BarSegment(x=x, width=width, kind=kind))
        x += width
    return tuple(segments)


def columns(replicas: Sequence[int]) -> tuple[BarSegment, ...]:
    """Return one column for each block, as high as its number of servers. A block without a server gets a full-height
    mark."""
    most = max(replicas, default=0) or 1
    width = WIDTH / max(len(replicas), 1)
    drawn: list[BarSegment] = []
    for i, value in enumerate(replicas):
        height = HEIGHT * (value / most if value else 1.0)
        kind = "none" if not value else "thin" if value == 1 else "good"
        drawn.append(
            BarSegment(x=i * width + width * 0.06, width=width * 0.88, y=HEIGHT - height, height=height, kind=kind)
        )
    return tuple(drawn)


def presence(times: Iterable[PresenceView], *, now: float, seconds: float) -> tuple[BarSegment, ...]:
    """Return a node's times of presence in the last `seconds`, each wide enough to be seen."""
    begin = now - seconds
    segments: list[BarSegment] = []
    for one in times:
        left = min(max((one.since - begin) / seconds, 0.0), 1.0) * WIDTH
        right = min(max(((now if one.until is None else one.until) - begin) / seconds, 0.0), 1.0) * WIDTH
        if right > left:
            width = max(right - left, 0.3)
            segments.append(BarSegment(x=min(left, WIDTH - width), width=width, kind="good"))
    return tuple(segments)


def runs_of(replicas: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Group neighbouring blocks that have equally many servers, as `(start, end, replicas)`: the text version of the
    columns."""
    ends = [end for end, (one, following) in enumerate(pairwise((*replicas, None)), 1) if one != following]
    return tuple((start, end, replicas[start]) for start, end in pairwise((0, *ends)))
