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


def num_electors(roster: Collection[str], min_group: int) -> int:
    """How many of `roster`, the members of a state, must vote for the state that follows from it.

    Two thirds, so that neither strangers nor a part of the members alone can take the run with them. A run with a
    `min_group` of 1 lets a single survivor go on, so there it is one, and each of its members is trusted that far.
    """
    return min(1, len(roster)) if min_group == 1 else quorum(len(roster))


def continues(roster: Collection[str], voters: Collection[str], min_group: int) -> bool:
    """Whether what `voters` voted for may follow from a state with this `roster`. A run's initial state has none."""
    return len(set(roster) & set(voters)) >= num_electors(roster, min_group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """`decided`: what has a quorum. `hopeless`: nothing can get one any more. `reason`: why, in words."""

    decided: Outcome | None
    hopeless: bool
    reason: str


def tally(
    members: Collection[str],
    votes: Mapping[str, Vote],
    silent: Iterable[str],
    *,
    roster: Collection[str] = (),
    min_group: int = 1,
) -> Tally:
    """Count `votes` by member. `silent` are members that will not vote any more.

    `roster` are the members of the state before, of whom enough must be among the voters too (see `num_electors`).
    """
    needed = quorum(len(members))
    counts = Counter(vote.outcome for vote in votes.values())
    outcome, most = counts.most_common(1)[0] if counts else (None, 0)
    supporters = {peer for peer, vote in votes.items() if vote.outcome == outcome}
    outstanding = set(members) - votes.keys() - set(silent)
    if most >= needed:
        if continues(roster, supporters, min_group):
            return Tally(decided=outcome, hopeless=False, reason="")
        reason = f"{len(supporters & set(roster))} of the {len(roster)} members of the state before voted for it"
        reason = f"{reason}, and {num_electors(roster, min_group)} must"
        return Tally(decided=None, hopeless=not continues(roster, supporters | outstanding, min_group), reason=reason)
    split = f", in {len(counts)} different outcomes" if len(counts) > 1 else ""
    reason = f"{len(votes)} of {len(members)} members voted{split}, and {needed} must agree"
    return Tally(decided=None, hopeless=most + len(outstanding) < needed, reason=reason)


def disagreement(
    mine: Outcome, votes: Mapping[str, Vote], owners: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Whom votes that differ from `mine` convict, and whom they only make suspect.

    The owner of a part that more than a third sees otherwise: not all of these lie, so it gave different results. Who
    has the same parts and a state that fewer have than mine; where as many have it, it may be mine that is damaged (see
    `mending`). A vote that differs in parts of others proves nothing: either it is made up,
    or an owner gave its voter something else; one vote could otherwise turn all honest members against each other.
    """
    differing = {peer: _owners_of_other_parts(mine, vote.outcome, owners) for peer, vote in votes.items()}
    counts = Counter(owner for differ in differing.values() for owner in differ)
    convicted = {owner for owner, count in counts.items() if 3 * count > len(owners)}
    suspects = {peer for peer, differ in differing.items() if differ - convicted}
    supporters = Counter(vote.outcome for vote in votes.values())
    convicted |= {
        peer
        for peer, vote in votes.items()
        if vote.outcome != mine and not differing[peer] and supporters[vote.outcome] < supporters[mine]
    }
    return tuple(sorted(convicted)), tuple(sorted(suspects - convicted))


def _owners_of_other_parts(mine: Outcome, other: Outcome, owners: tuple[str, ...]) -> set[str]:
    parts = zip(owners, mine.part_digests, other.part_digests, strict=False)
    return {owner for owner, own, theirs in parts if own != theirs}
