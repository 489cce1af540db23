"""Facts that a certificate proves, the history of certificates that led to a state, and the choice between histories.

Two certificates of one run can contradict each other only if the run has two first groups or a `min_group` of 1, or if
its author signs a resume order and other members go on without the order. All then follow the certificate of higher
`rank`: a later order, more outer steps, the later admission, more members.

A newcomer, an observer at its first look, and the members of a run before its first outer step have no state of their
own from which a certificate could follow. They ask several peers, and follow the history that most of
its own voters show (`most_supported`): each of these had to sign it and to answer. So a few keys gain nothing by a
later step than all others, or by a certificate that they did not vote for. A party with more keys than the run has
members can still win: in an open run keys cost nothing. Only a run's `admission`, and a resume order of its author,
outweigh any number of keys.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from swarm_protocol.commit_messages import Certificate, Outcome, ResumeOrder
from swarm_protocol.training_messages import Contribution, Group

from swarm.training.round.quorum import Succession

Rank: TypeAlias = tuple[int, int, int, int, bytes]
"""The order of certificates: of two that contradict each other, members follow the one of higher rank."""

_COMPLEMENTS = bytes(reversed(range(256)))
"""255 minus each byte value, so that of otherwise equal ranks the smaller digest has the higher one."""

MAX_HISTORY_LINKS = 512

MAX_HISTORY_BYTES = 16 << 20
"""A certificate of 16 members has 10 KB, so only groups of hundreds reach this limit. It takes 3 s to check."""

MAX_ASKED_FOR_STANDING = 16
"""Peers that are asked for their standing at one time. At most half are chosen as members of the own state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The facts that a valid certificate proves. `origin` is the group whose contributions the outcome reduces. The
    `voters` had all parts of the outcome. `order` is the author's last resume order before it, if any.

    If `is_order`, the certificate is that order itself, in the form of a group of the order's roster. It changes only
    whose votes count from now on, not the roster in the state.
    """

    certificate: bytes
    attempt: int
    origin: Group
    outcome: Outcome
    voters: tuple[str, ...]
    order: ResumeOrder | None = None
    is_order: bool = False

    @classmethod
    def of_order(cls, order: ResumeOrder, data: bytes) -> Proof:
        """Return what a resume order proves. `data` is the order as its author signed it."""
        digest = hashlib.sha256(data).digest()
        return cls(
            certificate=Certificate(order=data).to_bytes(),
            attempt=0,
            origin=Group(
                run=order.run,
                step=order.outer_step + 1,
                attempt=0,
                state_digest=order.state_digest,
                members=tuple(Contribution(peer_id=peer) for peer in order.roster),
                reduce_s=0.0,
                vote_s=0.0,
                order=data,
            ),
            outcome=Outcome(origin_digest=digest, part_digests=(), state_digest=order.state_digest),
            voters=order.roster,
            order=order,
            is_order=True,
        )

    @property
    def sequence(self) -> int:
        """The sequence of the last resume order; 0 if there was none."""
        return self.order.sequence if self.order else 0

    @property
    def roster(self) -> tuple[str, ...]:
        """The members of the committed state, whose votes decide the next one."""
        return self.origin.roster

    @property
    def is_known_to_roster(self) -> bool:
        """Return whether more than a third of the roster voted. If fewer than a third lie, an honest member did, so the
        group is no made-up one. False if most members that voted have left with this state."""
        return 3 * len(set(self.roster) & set(self.voters)) > len(self.roster)

    @property
    def outer_step(self) -> int:
        """The outer step of the committed state. A round that only admits members is no outer step."""
        return self.origin.step if self.origin.num_tokens else self.origin.step - 1

    @property
    def mean_loss(self) -> float:
        """The group's mean training loss, weighted by tokens. Only for a group that has trained."""
        origin = self.origin
        return sum(member.loss * member.num_tokens for member in origin.members) / origin.num_tokens

    @property
    def next_attempt(self) -> int:
        """The first attempt of the next round. A round that only admits members does not end the step."""
        return 0 if self.origin.num_tokens else self.attempt + 1

    @property
    def rank(self) -> Rank:
        complement = self.outcome.state_digest.translate(_COMPLEMENTS)
        return (self.sequence, self.outer_step, self.next_attempt, len(self.origin.members), complement)


class CertificateHistory:
    """The certificates that led one replica to its state, in the order of the states.

    If there are too many, links whose neighbours follow from each other without them are removed first.
    """

    def __init__(self, succession: Succession, links: Iterable[Proof] = ()) -> None:
        self._succession = succession
        self._links: list[Proof] = []
        self.add(links)

    @property
    def rosters(self) -> tuple[tuple[str, ...], ...]:
        return tuple(link.roster for link in self._links)

    @property
    def certificates(self) -> tuple[bytes, ...]:
        return tuple(link.certificate for link in self._links)

    def since(self, outer_step: int) -> tuple[Proof, ...]:
        """Return the links to the states of `outer_step` and later."""
        return tuple(link for link in self._links if link.outer_step >= outer_step)

    def contradicts(self, place: tuple[int, int, int], state_digest: bytes) -> bool:
        """Return whether another state than that of `state_digest` has this `place`: its sequence, outer step and next
        attempt. False also if the link of that place was removed, or if the replica has followed both."""
        digests = {link.outcome.state_digest for link in self._links if link.rank[:3] == place}
        return bool(digests) and state_digest not in digests

    def stays_apart(self, link: Proof) -> bool:
        """Return whether `link` is of a history that contradicts this one, and that may never become one with it, as
        histories without an outer step, and those of two resume orders, still do."""
        is_late = link.outer_step > 0 and bool(self._links) and link.sequence == self._links[-1].sequence
        return is_late and self.contradicts(link.rank[:3], link.outcome.state_digest)

    def add(self, links: Iterable[Proof]) -> None:
        """Add checked `links`."""
        known = {link.rank for link in self._links}
        new = {link.rank: link for link in links if link.rank not in known}
        self._links = sorted((*self._links, *new.values()), key=lambda link: link.rank)
        while len(self._links) > MAX_HISTORY_LINKS or self._num_bytes > MAX_HISTORY_BYTES:
            del self._links[self._spare()]

    @property
    def _num_bytes(self) -> int:
        return sum(len(link.certificate) for link in self._links)

    def _spare(self) -> int:
        """Return the index of the first link whose neighbours follow from each other without it, else of the oldest."""
        for index in range(1, len(self._links) - 1):
            before, after = self._links[index - 1], self._links[index + 1]
            if self._succession.is_enough(before.roster, after.voters):
                return index
        return 0


def whom_to_ask(peers: Iterable[str], roster: Collection[str], chance: random.Random) -> list[str]:
    """Return some of `peers`, members of `roster` first, each drawn anew by `chance`.

    Strangers cannot displace the members. If these are gone, strangers delay the others, but do not keep them out: what
    a peer claims does not count.
    """
    drawn = sorted(peers)
    chance.shuffle(drawn)
    members = [peer for peer in drawn if peer in roster][: MAX_ASKED_FOR_STANDING // 2]
    return list(dict.fromkeys((*members, *drawn)))[:MAX_ASKED_FOR_STANDING]


def in_own_order(peers: Iterable[str], me: str) -> list[str]:
    """Return `peers` in an order that depends on `me`, so that each process asks others first."""
    return sorted(peers, key=lambda peer: hashlib.sha256(f"{me}/{peer}".encode()).digest())


def most_supported(shown: Mapping[str, Proof]) -> Proof | None:
    """Return the certificate, of those `shown` by peers, whose history most of its own voters show; None if there is
    none.

    A later resume order outweighs any number of voters. A tie goes to the higher rank.
    """

    def worth(proof: Proof) -> tuple[object, ...]:
        voters = [peer for peer, each in shown.items() if peer in each.voters and are_of_one_history(proof, each)]
        return (proof.sequence, len(voters), proof.rank)

    return max(shown.values(), key=worth, default=None)


def are_of_one_history(one: Proof, other: Proof) -> bool:
    """Return whether both prove one state, or most voters of each voted for the other, too. Few members change between
    two steps of a run, and nobody can forge the votes of others."""
    if one.outcome.state_digest == other.outcome.state_digest:
        return True
    common = set(one.voters) & set(other.voters)
    return 2 * len(common) > max(len(one.voters), len(other.voters))
