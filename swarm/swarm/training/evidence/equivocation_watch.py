"""Remembers what a member has heard others sign in the attempts of the last rounds, to find two statements that differ.

Votes come one by one, and many of them in locks and certificates, so that members of both sides of a fork find out who
was on both once they hear of each other. All that is noted has been verified. Bounded for each peer, so that nobody
displaces what others have said. Anyone can make a certificate or a group of keys of its own: what peers have said that
`is_heard` does not name is not noted, unless something that they said before is.

Used on the event loop, without I/O; `Convictions` owns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from swarm_protocol.equivocation_messages import Equivocation, StatedReport, StatedVote, StatementKind
from swarm_protocol.training_messages import Certificate, Contribution, Group, Lock, Ready, SignedGroup, Vote

from swarm.newest_items import NewestItems
from swarm.training.evidence.equivocation import (
    Statement,
    statement_of_group,
    statement_of_report,
    statement_of_vote,
)
from swarm.training.round.quorum import electors_of
from swarm.training.state.certificate import vote_of_lock

S = TypeVar("S")

MAX_PEERS = 512
"""Peers whose votes and reports are remembered: two full groups."""
MAX_STATEMENTS = 32
"""Votes and reports of one peer: those of some ten attempts, of 300 bytes each."""
MAX_COORDINATORS = 16
MAX_GROUPS = 2
"""Groups of one coordinator: one may have 400 KiB."""


class EquivocationWatch:
    """`found` is called with each two statements that differ, of others than `me`, once for a peer and a step."""

    def __init__(self, me: str, found: Callable[[Equivocation], None], is_heard: Callable[[str], bool]) -> None:
        self._me = me
        self._found = found
        self._votes = _Heard[StatedVote](MAX_PEERS, MAX_STATEMENTS, is_heard)
        self._reports = _Heard[StatedReport](MAX_PEERS, MAX_STATEMENTS, is_heard)
        self._groups = _Heard[SignedGroup](MAX_COORDINATORS, MAX_GROUPS, is_heard)
        self._told = NewestItems[tuple[str, int], None](MAX_PEERS)

    def vote(self, peer: str, vote: Vote) -> None:
        stated = StatedVote.of(vote)
        other = self._votes.other(peer, statement_of_vote(stated), stated)
        if other is not None:
            self._tell("vote", peer, other.step, (other.to_bytes(), stated.to_bytes()))

    def report(self, peer: str, ready: Ready) -> None:
        self._report(ready, ready.contribution_of(peer), ready.sequence)

    def group(self, signed: SignedGroup) -> None:
        """Note a group, and the reports in it."""
        other = self._groups.other(signed.signer, statement_of_group(signed.group), signed)
        if other is not None:
            self._tell("group", signed.signer, other.group.step, (other.data, signed.data))
        for member in signed.group.members:
            self._report(signed.group, member, signed.sequence)

    def lock(self, lock: Lock, origin: SignedGroup, roster: tuple[str, ...]) -> None:
        """Note the first votes that `lock` is made of, which is of an outcome of the group `origin`."""
        electors, vote = electors_of(roster, origin.group), vote_of_lock(lock, origin)
        for each in lock.votes:
            self.vote(electors[each.place], replace(vote, signature=each.signature))

    def certificate(self, certificate: Certificate, signed: SignedGroup) -> None:
        """Note the second votes of `certificate`, whose group is `signed`."""
        if certificate.outcome is None:
            return
        vote = signed.vote(certificate.outcome, "commit")
        for each in certificate.votes:
            self.vote(signed.group.peer_ids[each.place], replace(vote, signature=each.signature))

    def _report(self, place: Ready | Group, report: Contribution, sequence: int) -> None:
        stated = StatedReport(
            step=place.step, attempt=place.attempt, state_digest=place.state_digest, sequence=sequence, report=report
        )
        peer = report.peer_id
        other = self._reports.other(peer, statement_of_report(stated), stated)
        if other is not None:
            self._tell("report", peer, other.step, (other.to_bytes(), stated.to_bytes()))

    def _tell(self, kind: StatementKind, peer: str, step: int, two: tuple[bytes, bytes]) -> None:
        if peer == self._me or (peer, step) in self._told:
            return
        self._told[peer, step] = None
        self._found(Equivocation(statement=kind, peer=peer, first=two[0], second=two[1]))


class _Heard(Generic[S]):
    """The last statements of the last peers, by what they are about."""

    def __init__(self, max_peers: int, max_statements: int, is_heard: Callable[[str], bool]) -> None:
        self._max_statements = max_statements
        self._is_heard = is_heard
        self._of_peer = NewestItems[str, NewestItems[tuple[object, str], tuple[bytes, S]]](max_peers)

    def other(self, peer: str, statement: Statement, item: S) -> S | None:
        """Return what `peer` has said otherwise about the same attempt, or None; then `item` is remembered."""
        if peer not in self._of_peer and not self._is_heard(peer):
            return None
        known = self._of_peer[peer] = self._of_peer.get(peer) or NewestItems(self._max_statements)
        key = (statement.attempted, statement.topic)
        if key in known:
            content, earlier = known[key]
            return earlier if content != statement.content else None
        known[key] = (statement.content, item)
        return None
