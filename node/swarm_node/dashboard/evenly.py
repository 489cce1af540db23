"""Chooses few of many, evenly, where some are worth more than others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def evenly(is_preferred: Sequence[bool], limit: int) -> list[int]:
    """At most `limit` places, in order: evenly spaced with both ends, but the first preferred one of those near to it
    instead of each."""
    count = len(is_preferred)
    if count <= limit or limit < 2:
        return list(range(max(0, count - limit), count))
    ends = [round(at * (count - 1) / (limit - 1)) for at in range(limit)]
    inner = (range(place, following) for place, following in pairwise(ends[1:]))
    return [0, *(next((at for at in near if is_preferred[at]), near[0]) for near in inner), count - 1]
