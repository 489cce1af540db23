"""How a group decides: two thirds of its members, rounded up, vote for one outcome.

Any two such majorities of one group share a member unless more than a third of it lies, and a member votes once in an
attempt. A member that has voted says so when it reports to a later attempt, whose group then finishes that outcome
before any other (see `round`): so an outcome that was decided unseen stays decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from swarm_protocol.training_messages import Outcome, Vote


def quorum(num_members: int) -> int:
    """How many votes decide: ceil(2 n / 3), so 1 of 1, 2 of 2, 2 of 3, 3 of 4, 6 of 8."""
    return -(-2 * num_members // 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """`decided`: what has a quorum. `hopeless`: nothing can get one any more. `reason`: why, in words."""

    decided: Outcome | None
    hopeless: bool
    reason: str


def tally(members: Collection[str], votes: Mapping[str, Vote], silent: Iterable[str]) -> Tally:
    """Count `votes` by member. `silent` are members that will not vote any more."""
    needed = quorum(len(members))
    counts = Counter(vote.outcome for vote in votes.values())
    outcome, most = counts.most_common(1)[0] if counts else (None, 0)
    if most >= needed:
        return Tally(decided=outcome, hopeless=False, reason="")
    outstanding = len(set(members) - votes.keys() - set(silent))
    split = f", in {len(counts)} different outcomes" if len(counts) > 1 else ""
    reason = f"{len(votes)} of {len(members)} members voted{split}, and {needed} must agree"
    return Tally(decided=None, hopeless=most + outstanding < needed, reason=reason)


def disagreement(mine: Outcome, votes: Mapping[str, Vote], owners: tuple[str, ...]) -> tuple[str, ...]:
    """Whom to suspect for votes that differ from `mine`: owners of the parts that differ, or else who voted so."""
    blamed: set[str] = set()
    for peer, vote in votes.items():
        pairs = zip(owners, mine.part_digests, vote.outcome.part_digests, strict=False)
        liars = {owner for owner, own, other in pairs if own != other}
        if liars:
            blamed |= liars
        elif vote.outcome != mine:
            blamed.add(peer)
    return tuple(sorted(blamed))
