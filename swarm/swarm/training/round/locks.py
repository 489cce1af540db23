"""Locks: what an earlier attempt may have committed, and so what a later group must finish before anything new.

A member that has seen the first votes of a quorum for one outcome holds a lock, and only then votes a second time. So
whatever was committed, a quorum holds a lock of it. A report names the reporter's highest lock, and is signed; a group
carries the reports, and the highest lock that they name, with its votes. Which outcome a group resumes therefore
follows from what it carries, and every member recomputes it (`lock_complaint`). That the votes of a lock are genuine is
checked where there are keys (`RunSignatures.check_lock`).

The phases are those of PBFT (Castro and Liskov 1999), prepare and commit; that a member accepts only what a lock of a
later attempt than its own justifies is the rule of Tendermint (Buchman et al. 2018, arXiv 1807.04938) and HotStuff (Yin
et al. 2019, arXiv 1803.05069). Here members come and go, so that a quorum is one of the state's members, and of the
attempt's group (see `quorum`).

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from swarm_protocol.training_messages import Contribution, Group, Lock, LockClaim, PlacedSignature, Vote


def make_lock(votes: Mapping[str, Vote], electors: Sequence[str]) -> Lock:
    """Return the lock that these equal first `votes` of a quorum make. Votes of others than `electors` are not kept."""
    vote = next(iter(votes.values()))
    placed = tuple(
        PlacedSignature(place=place, signature=votes[peer].signature)
        for place, peer in enumerate(electors)
        if peer in votes
    )
    return Lock(attempt=vote.attempt, group_digest=vote.group_digest, outcome=vote.outcome, votes=placed)


def highest_claim(members: Iterable[Contribution]) -> LockClaim | None:
    """Return the highest lock that `members` report; None if they report none. Of one attempt there are two only if a
    third of the members lied."""
    return max((member.locked for member in members if member.locked is not None), default=None)


def lock_complaint(group: Group) -> str:
    """Return why `group` resumes another outcome than its reports demand; empty if it resumes the right one, or none.

    A member whose own report, with its own lock, is in the group needs no further rule: its lock is among those that
    the group's is compared with.
    """
    claim, lock = highest_claim(group.members), group.lock
    if (lock.claim if lock else None) != claim:
        return "it does not resume the outcome of the highest lock that its members report"
    if lock is not None and lock.attempt >= group.attempt:
        return "it resumes an outcome of no earlier attempt"
    return ""
