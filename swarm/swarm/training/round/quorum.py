"""Counts votes: how many members must agree on a state, what they lock, and what differing votes prove.

An outcome needs the votes of two thirds of its group's deciding members, rounded up, and of enough members of the
state before (`Succession`), twice: prepare votes make a lock, commit votes a certificate. The deciding members are
those that are not on probation, or all if all are (`Group.deciding`). Any two sets of members that are enough
for one state share a member. Two sets of two thirds share an honest one if fewer than a third lie. A member casts one
vote of each kind in an attempt. A member that holds a lock says so when it reports to a later attempt, whose group then
finishes the locked outcome before any other. So an outcome stays decided, even if nobody saw the decision. The page
"One history" of the documentation has the whole argument.

A member that has seen the prepare votes of a quorum for one outcome holds a lock, and only then casts its commit vote.
So for every committed outcome a quorum holds a lock. A signed report names the reporter's highest lock. A group carries
the reports, and the highest lock that they name, with its votes. Which outcome a group resumes therefore follows from
the group itself, and every member recomputes it (`lock_complaint`). `RunSignatures.check_lock` verifies the signatures
of a lock's votes.

The phases are those of PBFT (Castro and Liskov 1999), prepare and commit, which Tendermint calls prevote and precommit;
a lock is what PBFT calls a prepared certificate. A member that holds a lock accepts another outcome only if a lock of a
later attempt justifies it, as in Tendermint (Buchman et al. 2018, arXiv 1807.04938) and HotStuff (Yin et al. 2019,
arXiv 1803.05069). Unlike there, members come and go, so a quorum is needed both of the state's members and of the
attempt's group.

All functions here are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from swarm_protocol.commit_messages import Lock, LockClaim, Outcome, PlacedSignature, Vote
from swarm_protocol.training_messages import Contribution, Group, SignedGroup

from swarm.training.run.run_config import RunConfig


def quorum(num_members: int) -> int:
    """Return how many votes decide: ceil(2 n / 3), so 1 of 1, 2 of 2, 2 of 3, 3 of 4, 6 of 8."""
    return -(-2 * num_members // 3)


def enough_for_one_honest(num_deciding: int) -> int:
    """Return how many of `num_deciding` members include an honest one if fewer than a third lie: more than a third, and
    at least two."""
    return max(2, num_deciding // 3 + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """A run's rule for how many members of a state (its roster) must vote for the state that follows it.

    Usually two thirds must, so that neither strangers nor some of the members alone can take over the run. Once a
    coordinator has lacked two thirds for `majority_after_s` seconds (0: never), a majority is enough: more than half,
    or exactly half if that includes the roster's first member in the order of peer ids. Any two majorities share a
    member, as any two sets of two thirds do, so they cannot decide differently, whenever each member's time is over.
    The time is no protection: it only gives members that pause the chance to come back. Majorities are safe if all
    members are honest; two thirds are safe even if fewer than a third lie.

    In a run with a `min_group` of 1 a single survivor may go on, so each member is trusted that far.
    """

    min_group: int = 1
    majority_after_s: float = 0.0

    @classmethod
    def of(cls, config: RunConfig) -> Succession:
        """Return the rule of the run with this `config`."""
        return cls(min_group=config.min_group, majority_after_s=config.majority_after_s)

    @property
    def in_words(self) -> str:
        """Return who decides, and what that is safe against, in words."""
        if self.min_group == 1:
            return "any one member may go on alone: a partition can part the run for good (min_group = 1)"
        if self.majority_after_s:
            wait = f"{self.majority_after_s:g} s"
            return f"two thirds decide, after {wait} a majority: safe against crashes and partitions, not against liars"
        return "two thirds decide: safe against crashes, partitions, and fewer than a third that lie"

    def is_usual(self, roster: Collection[str], voters: Collection[str]) -> bool:
        """Return whether two thirds of `roster` are among `voters`, or one member if `min_group` is 1. A run's initial
        state has no roster and needs no voters."""
        return len(set(roster) & set(voters)) >= self.num_usual(roster)

    def num_usual(self, roster: Collection[str]) -> int:
        return min(1, len(roster)) if self.min_group == 1 else quorum(len(roster))

    def num_enough(self, roster: Collection[str], present: Collection[str]) -> int:
        """Return how many members of `roster` are enough once the majority rule applies, if `present` are there."""
        usual = self.num_usual(roster)
        if not self.majority_after_s or not roster:
            return usual
        half, odd = divmod(len(roster), 2)
        has_first = not odd and min(roster) in present
        return min(usual, half if has_first else half + 1)

    def is_enough_of_any(self, rosters: Iterable[Collection[str]], voters: Collection[str]) -> bool:
        """Return whether `voters` are enough for one of several rosters that may decide."""
        return any(self.is_enough(roster, voters) for roster in rosters)

    def is_enough(self, roster: Collection[str], voters: Collection[str]) -> bool:
        """Return whether `voters` are enough to decide the state that follows from one with this `roster`."""
        return len(set(roster) & set(voters)) >= self.num_enough(roster, voters)


USUAL = Succession()
"""The rule of two thirds, without a majority rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The result of a count. `decided` is the outcome that has a quorum, or None. If the vote is `hopeless`, no outcome
    can get a quorum any more. `reason` says in words why nothing is decided."""

    decided: Outcome | None
    hopeless: bool
    reason: str


def tally(
    members: Collection[str],
    votes: Mapping[str, Vote],
    silent: Iterable[str],
    *,
    roster: Collection[str] = (),
    succession: Succession = USUAL,
) -> Tally:
    """Count `votes`, which are by peer. Only votes of `members` count. `silent` members will not vote any more.
    `roster` are the members of the state before: enough of them must be among the voters, too."""
    needed = quorum(len(members))
    votes = {peer: vote for peer, vote in votes.items() if peer in members}
    counts = Counter(vote.outcome for vote in votes.values())
    outcome, most = counts.most_common(1)[0] if counts else (None, 0)
    supporters = {peer for peer, vote in votes.items() if vote.outcome == outcome}
    outstanding = set(members) - votes.keys() - set(silent)
    if most >= needed:
        if succession.is_enough(roster, supporters):
            return Tally(decided=outcome, hopeless=False, reason="")
        reason = f"{len(supporters & set(roster))} of the {len(roster)} members of the state before voted for it"
        hopeless = not succession.is_enough(roster, supporters | outstanding)
        return Tally(decided=None, hopeless=hopeless, reason=f"{reason}, which is too few")
    split = f", in {len(counts)} different outcomes" if len(counts) > 1 else ""
    reason = f"{len(votes)} of {len(members)} members voted{split}, and {needed} must agree"
    return Tally(decided=None, hopeless=most + len(outstanding) < needed, reason=reason)


def make_lock(votes: Mapping[str, Vote], electors: Sequence[str]) -> Lock:
    """Return the lock that these equal prepare `votes` of a quorum make. It keeps only the votes of `electors`."""
    vote = next(iter(votes.values()))
    placed = tuple(
        PlacedSignature(place=place, signature=votes[peer].signature)
        for place, peer in enumerate(electors)
        if peer in votes
    )
    return Lock(attempt=vote.attempt, group_digest=vote.group_digest, outcome=vote.outcome, votes=placed)


def vote_of_lock(lock: Lock, origin: SignedGroup) -> Vote:
    """Return the vote that the signatures of `lock` sign. Its outcome comes from the group `origin`."""
    vote = origin.vote(lock.outcome, "prepare")
    return replace(vote, attempt=lock.attempt, group_digest=lock.group_digest)


def presence(num: int, num_needed: int, *, of_roster: bool, how: str = "there") -> str:
    """Return in words why a step waits: how many of the members that it needs are there."""
    which = "members of the last step that the next one needs" if of_roster else "members that a step needs"
    return f"{num} of the {num_needed} {which} {'is' if num == 1 else 'are'} {how}"


def electors_of(roster: Sequence[str], origin: Group) -> tuple[str, ...]:
    """Return the peers whose votes for an outcome of the group `origin` count: the `roster` of the state before. In a
    run's first round the roster is empty, and the members of `origin` take its place."""
    return tuple(roster) or origin.peer_ids


def highest_claim(members: Iterable[Contribution]) -> LockClaim | None:
    """Return the highest lock that `members` report, or None if they report none. Two different locks of one attempt
    exist only if a third of the members lied."""
    return max((member.locked for member in members if member.locked is not None), default=None)


def lock_complaint(group: Group) -> str:
    """Return why `group` resumes another outcome than its reports demand; empty if it resumes the right one, or none.

    A member need not check its own lock in addition: its report is in the group, so the group's lock is compared with
    it, too.
    """
    claim, lock = highest_claim(group.members), group.lock
    if (lock.claim if lock else None) != claim:
        return "it does not resume the outcome of the highest lock that its members report"
    if lock is not None and lock.attempt >= group.attempt:
        return "it resumes an outcome of no earlier attempt"
    return ""


def disagreement(
    mine: Outcome, votes: Mapping[str, Vote], owners: tuple[str, ...], deciding: Collection[str]
) -> tuple[str, ...]:
    """Return the peers that votes differing from `mine` make suspect. They prove nothing against anyone.

    Only votes of `deciding` members count, as keys on probation cost nothing.

    The owner of a part is suspect if more than a third of them voted for another version of the part. One of these is
    honest, so the owner sent different results, or its backup sent a wrong one in its place. A member that has the same
    parts but another state is suspect if fewer members have that state than have the state of `mine`; otherwise `mine`
    may be the damaged one (see `repair_if_damaged`). Of a vote that differs in other parts, the voter is suspect:
    either it made the vote up, or an owner sent it another result. One vote could otherwise turn all honest members
    against each other.
    """
    differing = {peer: _owners_of_other_parts(mine, vote.outcome, owners) for peer, vote in votes.items()}
    counts = Counter(owner for peer, differ in differing.items() if peer in deciding for owner in differ)
    disputed = {owner for owner, count in counts.items() if 3 * count > len(deciding)}
    suspects = disputed | {peer for peer, differ in differing.items() if differ - disputed}
    supporters = Counter(vote.outcome for peer, vote in votes.items() if peer in deciding)
    suspects |= {
        peer
        for peer, vote in votes.items()
        if vote.outcome != mine and not differing[peer] and supporters[vote.outcome] < supporters[mine]
    }
    return tuple(sorted(suspects))


def _owners_of_other_parts(mine: Outcome, other: Outcome, owners: tuple[str, ...]) -> set[str]:
    parts = zip(owners, mine.part_digests, other.part_digests, strict=False)
    return {owner for owner, own, theirs in parts if own != theirs}
