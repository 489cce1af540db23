"""Who may use which samples in an interval, and how the cursor moves when a round commits.

A lease is a pure function of a committed cursor and a roster, so every replica computes all leases alone. A
member uses a prefix of its lease. What is committed never comes again; what is not, because a member vanished, was
slow or was refused, becomes a hole that the next leases fill first. So each sample is committed exactly once. This
holds as long as all replicas pass the same `used` to `advance`, which the round's votes see to.

No state: cursors are part of the committed `ReplicaState`. Which interval uses which is `lane`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias

Lease: TypeAlias = tuple[range, ...]
"""Sample ids in the order in which they are to be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Committed: every sample below `next_sample` that is in no hole. Holes are ascending, apart and not empty."""

    next_sample: int = 0
    holes: tuple[range, ...] = ()

    def __post_init__(self) -> None:
        floor = 0
        for hole in self.holes:
            if hole.step != 1 or hole.start < floor or hole.stop <= hole.start or hole.stop >= self.next_sample:
                raise ValueError(f"impossible hole {hole} in the samples below {self.next_sample}")
            floor = hole.stop + 1
        if self.next_sample < 0:
            raise ValueError(f"next_sample cannot be {self.next_sample}")

    @property
    def num_committed(self) -> int:
        return self.next_sample - sum(map(len, self.holes))


def leases(cursor: Cursor, members: Sequence[str], samples_per_member: int) -> dict[str, Lease]:
    """`samples_per_member` samples for each member, disjoint, holes first, in the order of `members`.

    Another member at the end changes nothing for those before it.
    """
    if samples_per_member < 1:
        raise ValueError(f"a lease cannot have {samples_per_member} samples")
    fresh = range(cursor.next_sample, cursor.next_sample + len(members) * samples_per_member)
    supply = [*cursor.holes, fresh]
    result = {}
    for member in members:
        taken, supply = _split(supply, samples_per_member)
        result[member] = tuple(taken)
    return result


def sample_ids(lease: Lease) -> list[int]:
    """The lease, written out."""
    return list(chain.from_iterable(lease))


def advance(cursor: Cursor, members: Sequence[str], samples_per_member: int, used: Mapping[str, int]) -> Cursor:
    """The cursor after a round committed, of each member in `used`, the first `used[member]` samples of its lease.

    `members` and `samples_per_member` are those the leases were made from; who is missing in `used` committed nothing.
    Raises ValueError if `used` names a stranger or more samples than were leased.
    """
    issued = leases(cursor, members, samples_per_member)
    if strangers := used.keys() - issued.keys():
        raise ValueError(f"{min(strangers)} has no lease")
    committed: list[range] = []
    for member, num_used in used.items():
        if not 0 <= num_used <= samples_per_member:
            raise ValueError(f"{member} cannot have used {num_used} of {samples_per_member} samples")
        committed += _split(list(issued[member]), num_used)[0]
    end = max([cursor.next_sample, *(part.stop for part in committed)])
    open_parts = [*cursor.holes, range(cursor.next_sample, end)]
    holes = _merge(_subtract(open_parts, sorted(committed, key=lambda part: part.start)))
    if holes and holes[-1].stop == end:
        end = holes.pop().start
    return Cursor(next_sample=end, holes=tuple(holes))


def _split(parts: list[range], count: int) -> tuple[list[range], list[range]]:
    """The first `count` numbers of `parts`, and the others."""
    taken: list[range] = []
    for index, part in enumerate(parts):
        if count < len(part):
            head = [part[:count]] if count else []
            return taken + head, [part[count:], *parts[index + 1 :]]
        if part:
            taken.append(part)
        count -= len(part)
    return taken, []


def _subtract(parts: list[range], committed: list[range]) -> list[range]:
    """What of the ascending `parts` is not in the ascending `committed`."""
    left: list[range] = []
    for part in parts:
        start = part.start
        for used in committed:
            if used.stop <= start or used.start >= part.stop:
                continue
            left.append(range(start, used.start))
            start = used.stop
        left.append(range(start, part.stop))
    return [part for part in left if part]


def _merge(parts: list[range]) -> list[range]:
    merged: list[range] = []
    for part in parts:
        if merged and merged[-1].stop == part.start:
            merged[-1] = range(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return merged


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
