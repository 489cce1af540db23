"""Names the links that are slower, or lose more packets, than the others, in collectives where all send to all.

Members of a collective measure how fast the others' messages arrive. In the matrix of transfer times, a row that stands
out shows a slow sender, a column a slow receiver, and a single cell a slow link between two members (C4D, Dong et al.
2024, arXiv 2406.04594, section on communication slow detection). Packet loss shows as a longer time. Deviations: the
median and the median absolute deviation of all cells decide what stands out, since volunteers' links differ and some
volunteers lie. A link is named only if it stands out in several collectives in a row, since volunteers' machines do
other work, too.

A member reports only its own column. So a liar can make itself a slow receiver, and links to itself slow, but a sender
is named only if most other members report it. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from swarm_protocol.records import RoundReport

SlowKind: TypeAlias = Literal["sender", "receiver", "link"]
Cell: TypeAlias = tuple[str, str]
"""A sender and a receiver."""

MIN_MEMBERS = 3
"""Minimum members of a collective. With two, there is no usual link to compare with."""

MIN_SLOWDOWN = 2.5
"""A link is named only if it is at least this many times slower than usual."""

NUM_DEVIATIONS = 5.0
"""A transfer time is slow if its logarithm is more than this many standard deviations above the median. The standard
deviation is estimated from the median absolute deviation. Links that differ only by usual noise stay below."""

MAD_TO_SIGMA = 1.4826
MIN_SIGMA = 0.15
"""Minimum standard deviation, since that of a few cells can be small by chance."""

ALL_OF_THEM = 0.75
"""A sender or a receiver is named if at least this share of its links is slow. Otherwise single links are named."""

FAST_BYTES_PER_S = 12.5e6
"""A link that carries this much, 100 Mbit/s, is not named, even if the others are much faster."""

NUM_CONFIRMATIONS = 4
"""A link is named once it was slow in this many collectives in a row."""

NEAR_STEPS = 2
"""Reports of steps at most this far apart are compared: members reach a step, and publish their reports, one by one."""

MAX_FOUND = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """A slow sender, receiver or link. `slowdown` is its transfer time divided by the median one. A "sender" has an
    empty `receiver`, which stands for all members, and a "receiver" an empty `sender`."""

    kind: SlowKind
    sender: str = ""
    receiver: str = ""
    slowdown: float

    def words(self, name_of: Callable[[str], str]) -> str:
        """Describe the finding in one line. `name_of` returns a peer's name."""
        times = f"{self.slowdown:.1f} times"
        match self.kind:
            case "sender":
                return f"{name_of(self.sender)} sends {times} slower than usual in this run"
            case "receiver":
                return f"{name_of(self.receiver)} receives {times} slower than usual in this run"
            case "link":
                return f"{name_of(self.sender)} sends {times} slower than usual to {name_of(self.receiver)} in this run"

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(peer for peer in (self.sender, self.receiver) if peer)


def slow_links(rates: Mapping[str, Mapping[str, float]]) -> tuple[SlowLink, ...]:
    """Return what stands out in one collective, the slowest first. `rates[receiver][sender]` is the bytes per second at
    which messages arrived; unknown rates are absent or 0."""
    time_of = {
        (sender, receiver): -math.log(rate)
        for receiver, column in rates.items()
        for sender, rate in column.items()
        if rate > 0 and sender != receiver
    }
    num_peers = len({peer for cell in time_of for peer in cell})
    if num_peers < MIN_MEMBERS or len(time_of) < MIN_MEMBERS * (MIN_MEMBERS - 1):
        return ()
    usual = statistics.median(time_of.values())
    slow = _slow_cells(time_of, usual)
    ends = _slow_ends(time_of.keys(), slow)

    def slowdown(cells: Iterable[Cell]) -> float:
        return math.exp(statistics.median(time_of[cell] for cell in cells) - usual)

    found = [SlowLink(kind=end, **{end: peer}, slowdown=slowdown(line)) for (end, peer), line in ends.items()]
    for cell in sorted(slow.difference(*ends.values())):
        found.append(SlowLink(kind="link", sender=cell[0], receiver=cell[1], slowdown=slowdown([cell])))
    return tuple(sorted(found, key=lambda each: -each.slowdown)[:MAX_FOUND])


def _slow_cells(time_of: Mapping[Cell, float], usual: float) -> set[Cell]:
    """Return the cells whose logarithm of the transfer time is far above the `usual` one."""
    sigma = MAD_TO_SIGMA * statistics.median(abs(each - usual) for each in time_of.values())
    least = usual + max(math.log(MIN_SLOWDOWN), NUM_DEVIATIONS * max(sigma, MIN_SIGMA))
    limit = max(least, -math.log(FAST_BYTES_PER_S))
    return {cell for cell, each in time_of.items() if each > limit}


def _slow_ends(cells: Collection[Cell], slow: Collection[Cell]) -> dict[tuple[SlowKind, str], list[Cell]]:
    """Return the senders, and then the receivers, nearly all of whose cells are `slow`, with these cells."""
    lines = defaultdict[tuple[SlowKind, str], list[Cell]](list)
    for sender, receiver in cells:
        lines["sender", sender].append((sender, receiver))
        lines["receiver", receiver].append((sender, receiver))
    return {
        end: line
        for end, line in sorted(lines.items(), key=lambda each: (each[0][0] == "receiver", each[0][1]))
        if len(line) >= MIN_MEMBERS - 1 and sum(cell in slow for cell in line) >= ALL_OF_THEM * len(line)
    }


class LinkWatch:
    """Follows the reports of one run's members, and names what stood out in NUM_CONFIRMATIONS steps in a row."""

    def __init__(self) -> None:
        self._step = 0
        self._latest: deque[tuple[SlowLink, ...]] = deque(maxlen=NUM_CONFIRMATIONS)

    @property
    def named(self) -> tuple[SlowLink, ...]:
        """Return what stood out in each of the NUM_CONFIRMATIONS newest steps, with its slowdown in the newest one."""
        if len(self._latest) < NUM_CONFIRMATIONS:
            return ()
        *before, newest = ({(each.kind, *each.peers): each for each in step} for step in self._latest)
        return tuple(each for key, each in newest.items() if all(key in step for step in before))

    def update(self, reports: Mapping[str, RoundReport]) -> None:
        """Take the members' newest reports. They are compared once for each step that most members have reached."""
        steps = sorted(report.outer_step for report in reports.values())
        if not steps or (step := steps[(len(steps) - 1) // 2]) <= self._step:
            return
        self._step = step
        near = {peer: each for peer, each in reports.items() if abs(each.outer_step - step) <= NEAR_STEPS}
        columns = {peer: report.rates_from.items() for peer, report in near.items()}
        members = {peer: {each: rate for each, rate in column if each in reports} for peer, column in columns.items()}
        self._latest.append(slow_links(members))
