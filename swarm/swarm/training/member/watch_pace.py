"""How often a member of a run looks where the others are. Pure.

Members of a round tell each other what they do, so looking is for the one that missed a round, or that works apart from
others without knowing. What this costs is the same in a run of thousands, and less the longer its intervals are.
"""

from __future__ import annotations

NUM_WATCHED = 2
"""Number of others that are asked where they are each time."""
WATCH_S, MAX_WATCH_S = 5.0, 30.0
LIST_S, MAX_LIST_S = 15.0, 60.0
FIRST_WATCH_S = 0.5
"""Seconds between two looks, and between two reads of the membership, when a run's first group forms, as nothing else
says who is there; less often the longer its members train or wait."""


def watch_s(interval_s: float) -> float:
    """Return the seconds after which others are asked again, by a member that trains for `interval_s` at a time: a
    twentieth of that, between WATCH_S and MAX_WATCH_S. Who missed a round loses no more of an interval by it."""
    return min(MAX_WATCH_S, max(WATCH_S, interval_s / 20))


def list_s(interval_s: float) -> float:
    """Return the seconds between two reads of the membership by a member that trains for `interval_s` at a time: a
    fifth of that, between LIST_S and MAX_LIST_S. Newcomers ask the others on arrival."""
    return min(MAX_LIST_S, max(LIST_S, interval_s / 5))
