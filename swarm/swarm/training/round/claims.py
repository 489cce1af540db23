"""Which of several histories to follow when there is no state of one's own to judge them by. Pure.

A newcomer, an observer at its first look, and the members of a run before its first outer step cannot ask whether a
certificate follows from what they know. They ask several peers, and take the history that most of its own voters show:
each of them had to sign for it, and had to answer. So a few keys that are further than all others, or that claim a
certificate they did not vote for, win nothing. Whoever brings more keys than the run has members still does: in an open
run keys cost nothing. What no number of keys outweighs is a run's `admission`, and a resume order of its author.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from swarm.training.round.certificate import Proof

MAX_ASKED = 16
"""Peers asked for their standing at one time, of whom half may be members of the own state."""


def whom_to_ask(claims: Mapping[str, int], roster: Collection[str], me: str) -> list[str]:
    """The peers that claim to be furthest. Strangers, who may claim anything, crowd out no members of `roster`.

    `claims` are outer steps by peer. Without a roster, claims count for nothing: a sample that differs from one `me` to
    the other has the same share of liars as all peers together.
    """
    if not roster:
        return sorted(claims, key=lambda peer: hashlib.sha256(f"{me}/{peer}".encode()).digest())[:MAX_ASKED]
    ranked = sorted(claims, key=lambda peer: (-claims[peer], peer))
    members = [peer for peer in ranked if peer in roster][: MAX_ASKED // 2]
    return list(dict.fromkeys((*members, *ranked)))[:MAX_ASKED]


def most_supported(shown: Mapping[str, Proof]) -> Proof | None:
    """The newest certificate of the history that most of its voters show; None if `shown`, by peer, is empty.

    A later resume order comes before any number. A tie goes to the higher rank.
    """

    def worth(proof: Proof) -> tuple[object, ...]:
        voters = [peer for peer, each in shown.items() if peer in each.voters and are_of_one_history(proof, each)]
        return (proof.sequence, len(voters), proof.rank)

    return max(shown.values(), key=worth, default=None)


def are_of_one_history(one: Proof, other: Proof) -> bool:
    """Whether they are of one state, or most of the voters of either voted for both. Between two steps of a run few
    members change; and nobody can make up the votes of others."""
    if one.outcome.state_digest == other.outcome.state_digest:
        return True
    common = set(one.voters) & set(other.voters)
    return 2 * len(common) > max(len(one.voters), len(other.voters))
