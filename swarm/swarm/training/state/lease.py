"""Leases: the samples that a member may use in an interval. A round's commit moves the cursor from which they follow.

A lease is a pure function of a committed cursor and a roster, so every replica computes all leases by itself. A member
uses a prefix of its lease. Committed samples are never leased again. Samples that are not committed, because a member
vanished, was slow or was refused, become a hole, which the next leases fill first. So each sample is committed exactly
once, as long as all replicas pass the same `used` to `advance`, which the round's votes ensure, and there are at most
MAX_HOLES holes. If members use far less than their leases, as in intervals that end by the clock, each round leaves
more holes; beyond that number the samples of the smallest are never used.

If rounds overlap with intervals, interval k begins before round k - 1 is committed, so its leases cannot depend on what
that round commits. There are then two stripes, one for odd intervals and one for even ones, each with its own samples,
cursor and roster. Without overlap there is one. Stripes never share a sample: a stripe's sample s is the data's sample
stripe + num_stripes * s. Round k moves the cursor of its own stripe, and sets its roster. Newcomers are also appended
to the other stripe, after the members that may already use their leases, so that newcomers train at once and no lease
in use changes.

No state: the stripes are part of the committed `ReplicaState`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import TypeAlias, overload

Lease: TypeAlias = tuple[range, ...]
"""Sample ids in the order of their use."""

MAX_STRIPES = 2
"""No member is more than one interval ahead of the committed state."""

MAX_HOLES = 8192
"""Maximum holes of a stripe, 220 KiB of a state's manifest. A manifest that is too large could be neither fetched nor
loaded."""

NUM_REMEMBERED = 4
"""Cursors whose leases are cached. Callers ask for one member at a time, and the leases of thousands of trainers take
milliseconds to compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The committed samples: those below `next_sample` that are in no hole.

    Holes are ascending, disjoint, not adjacent and not empty.
    """

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


@lru_cache(maxsize=NUM_REMEMBERED)
def leases(cursor: Cursor, members: tuple[str, ...], samples_per_member: int) -> Mapping[str, Lease]:
    """Return `samples_per_member` samples for each member, disjoint, holes first, in the order of `members`.

    A further member at the end does not change the leases of those before it.
    """
    if samples_per_member < 1:
        raise ValueError(f"a lease cannot have {samples_per_member} samples")
    fresh = range(cursor.next_sample, cursor.next_sample + len(members) * samples_per_member)
    supply = deque([*cursor.holes, fresh])
    return MappingProxyType({member: tuple(_take(supply, samples_per_member)) for member in members})


@dataclass(frozen=True, slots=True, eq=False)
class SampleIds(Sequence[int]):
    """The sample ids of a `lease` as a lazy sequence: in intervals that end by the clock, leases have far more samples
    than are used."""

    lease: Lease

    def __len__(self) -> int:
        return sum(map(len, self.lease))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.lease)

    @overload
    def __getitem__(self, where: int) -> int: ...

    @overload
    def __getitem__(self, where: slice) -> SampleIds: ...

    def __getitem__(self, where: int | slice) -> int | SampleIds:
        if isinstance(where, int):
            return next(iter(self[range(len(self))[where] :]))
        start, stop, step = where.indices(len(self))
        assert step == 1
        rest = deque(self.lease)
        _take(rest, start)
        return SampleIds(tuple(_take(rest, max(0, stop - start))))


def advance(cursor: Cursor, members: tuple[str, ...], samples_per_member: int, used: Mapping[str, int]) -> Cursor:
    """Return the cursor after a round that committed the first `used[member]` samples of each member's lease.

    `members` and `samples_per_member` are those the leases were made from. A member that is missing in `used` committed
    nothing. Raises ValueError if `used` names a peer without a lease, or more samples than were leased.
    """
    issued = leases(cursor, members, samples_per_member)
    if strangers := used.keys() - issued.keys():
        raise ValueError(f"{min(strangers)} has no lease")
    committed: list[range] = []
    for member, num_used in used.items():
        if not 0 <= num_used <= samples_per_member:
            raise ValueError(f"{member} cannot have used {num_used} of {samples_per_member} samples")
        committed += _take(deque(issued[member]), num_used)
    end = max([cursor.next_sample, *(part.stop for part in committed)])
    open_parts = [*cursor.holes, range(cursor.next_sample, end)]
    holes = _merge(_subtract(open_parts, sorted(committed, key=lambda part: part.start)))
    if holes and holes[-1].stop == end:
        end = holes.pop().start
    return Cursor(next_sample=end, holes=tuple(_largest(holes)))


def _largest(holes: list[range]) -> list[range]:
    """Return the MAX_HOLES largest of `holes`, in their order; of equal sizes the first."""
    by_size = sorted(range(len(holes)), key=lambda index: len(holes[index]), reverse=True)
    kept = set(by_size[:MAX_HOLES])
    return [hole for index, hole in enumerate(holes) if index in kept]


def _take(supply: deque[range], count: int) -> list[range]:
    """Remove the first `count` numbers of `supply`, or all if there are fewer, and return them."""
    taken: list[range] = []
    while count and supply:
        part = supply.popleft()
        if count < len(part):
            supply.appendleft(part[count:])
            part = part[:count]
        if part:
            taken.append(part)
        count -= len(part)
    return taken


def _subtract(parts: list[range], committed: list[range]) -> list[range]:
    """Return the ascending `parts` without the ascending `committed` ranges, each of which lies in one part."""
    left, used = list[range](), deque(committed)
    for part in parts:
        start = part.start
        while used and used[0].start < part.stop:
            left.append(range(start, used[0].start))
            start = used.popleft().stop
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStripe:
    """`roster` has the members with leases from `cursor`, in the order of their leases."""

    cursor: Cursor = field(default_factory=Cursor)
    roster: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.roster)) != len(self.roster):
            raise ValueError("a stripe's roster names a member twice")


def trainers_of(stripes: tuple[LeaseStripe, ...]) -> set[str]:
    """Return all peers with a lease for any interval."""
    return {peer for stripe in stripes for peer in stripe.roster}


def first_stripes(overlap_steps: int) -> tuple[LeaseStripe, ...]:
    """Return the stripes of a run before anything is leased."""
    return (LeaseStripe(),) * (MAX_STRIPES if overlap_steps else 1)


def index_of(step: int, num_stripes: int) -> int:
    """Return the index of the stripe that interval and round `step`, counted from 1, use."""
    return (step - 1) % num_stripes


def lease_of(stripes: tuple[LeaseStripe, ...], step: int, member: str, samples_per_member: int) -> Lease:
    """Return the samples that `member` may use in interval `step`; none if it is not in the roster."""
    index = index_of(step, len(stripes))
    stripe = stripes[index]
    own = leases(stripe.cursor, stripe.roster, samples_per_member).get(member, ())
    return tuple(
        range(index + len(stripes) * part.start, index + len(stripes) * part.stop, len(stripes)) for part in own
    )


def stripes_after(
    stripes: tuple[LeaseStripe, ...],
    step: int,
    roster: tuple[str, ...],
    samples_per_member: int,
    used: Mapping[str, int],
) -> tuple[LeaseStripe, ...]:
    """Return the stripes after round `step`. `used` counts the committed samples of each member's lease; `roster` has
    the next leases.

    Raises ValueError if `used` names a stranger or more samples than were leased.
    """
    index = index_of(step, len(stripes))
    cursor = advance(stripes[index].cursor, stripes[index].roster, samples_per_member, used)
    others = [_with_newcomers(stripe, roster) for stripe in stripes]
    return (*others[:index], LeaseStripe(cursor=cursor, roster=roster), *others[index + 1 :])


def admitted(stripes: tuple[LeaseStripe, ...], roster: tuple[str, ...]) -> tuple[LeaseStripe, ...]:
    """Return the stripes after a round that only admitted `roster`. All leases change: every interval starts again."""
    return tuple(replace(stripe, roster=roster) for stripe in stripes)


def _with_newcomers(stripe: LeaseStripe, roster: tuple[str, ...]) -> LeaseStripe:
    newcomers = tuple(sorted(set(roster) - set(stripe.roster)))
    return replace(stripe, roster=stripe.roster + newcomers)
