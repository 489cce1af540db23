"""Lanes of leases: which samples a member may use in which interval, when intervals overlap with rounds.

Interval k begins before round k - 1 is committed where rounds run under it, so its leases cannot follow from what that
round commits. There are then two lanes, one for odd intervals and one for even ones, each with samples, a cursor and a
roster of its own; without overlap there is one. Lanes never share a sample: the lane's own sample s is the data's
sample lane + num_lanes * s.

Round k moves the cursor of its own lane and puts its group there. Newcomers are appended to the other lane too, behind
those who may be using their leases already, so that they train at once and disturb nobody.

No state: the lanes are part of the committed `ReplicaState`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from swarm.training.inner.lease import Cursor, Lease, advance, leases

MAX_LANES = 2
"""Nobody is further than one interval ahead of the committed state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """`roster`: who holds the leases that follow from `cursor`, in the order of these."""

    cursor: Cursor = field(default_factory=Cursor)
    roster: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.roster)) != len(self.roster):
            raise ValueError("a lane's roster names a member twice")


def first_lanes(overlap_steps: int) -> tuple[Lane, ...]:
    """A run's, before anything is leased."""
    return (Lane(),) * (MAX_LANES if overlap_steps else 1)


def index_of(step: int, num_lanes: int) -> int:
    """The lane that interval and round `step`, counted from 1, use."""
    return (step - 1) % num_lanes


def lease_of(lanes: tuple[Lane, ...], step: int, member: str, samples_per_member: int) -> Lease:
    """The data's samples that `member` may use in interval `step`; none for a stranger."""
    index = index_of(step, len(lanes))
    lane = lanes[index]
    own = leases(lane.cursor, lane.roster, samples_per_member).get(member, ())
    return tuple(range(index + len(lanes) * part.start, index + len(lanes) * part.stop, len(lanes)) for part in own)


def committed(
    lanes: tuple[Lane, ...], step: int, roster: tuple[str, ...], samples_per_member: int, used: Mapping[str, int]
) -> tuple[Lane, ...]:
    """The lanes after round `step`: of each member in `used` so many samples of its lease; `roster` goes on.

    Raises ValueError if `used` names a stranger or more samples than were leased.
    """
    index = index_of(step, len(lanes))
    cursor = advance(lanes[index].cursor, lanes[index].roster, samples_per_member, used)
    others = [_with_newcomers(lane, roster) for lane in lanes]
    return (*others[:index], Lane(cursor=cursor, roster=roster), *others[index + 1 :])


def admitted(lanes: tuple[Lane, ...], roster: tuple[str, ...]) -> tuple[Lane, ...]:
    """The lanes after a round that only admitted `roster`. All leases are new: every interval starts over."""
    return tuple(replace(lane, roster=roster) for lane in lanes)


def _with_newcomers(lane: Lane, roster: tuple[str, ...]) -> Lane:
    newcomers = tuple(sorted(set(roster) - set(lane.roster)))
    return replace(lane, roster=lane.roster + newcomers)
