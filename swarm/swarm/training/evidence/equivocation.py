"""Evidence that a member signed two different statements about one attempt: two votes of one kind, two reports, or, as
the coordinator, two groups.

A fork of a run's history needs such statements (see "One history"). Both are signed, so together they convict their
signer for anyone with the run's file. Tendermint and similar protocols also call this equivocation (Buchman et al.
2018, arXiv 1807.04938; Sheng et al. 2021, arXiv 2010.06785, on what can be proved).

No honest member can be convicted. Within a process its attempts at a step only increase; in each it reports once, votes
once of each kind, and coordinates once. It writes the attempt to disk before others learn of it, and continues after it
when it restarts (`round.promise`). Both statements must have the same state and resume order, since attempts start from
zero for each. This is void for a key that is used by two processes at one time, or whose folder of votes was deleted or
restored from a backup. A run with a `min_group` of 1, whose members do not keep their promises, convicts nobody in this
way.

`EquivocationWatch` finds such statements: it remembers the signed statements of others about the attempts of the last
rounds. Votes come singly, and many in locks and certificates, so once the two sides of a fork see each other's
messages, they find the members that were on both. Single votes are not passed on, so two votes that went to different
members are not found if no lock or certificate that members show has one of them. Only verified statements are noted.
They are bounded for each peer, so that nobody displaces the statements of others. Anyone can make a certificate or a
group with keys of its own, so statements are noted only of peers that `is_heard` accepts, or of which some are noted
already. `Convictions` owns it.

No I/O. A check verifies two signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

from swarm_protocol.commit_messages import Certificate, Lock, Vote
from swarm_protocol.envelope import issued_at, unseal
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import verify
from swarm_protocol.proof_messages import (
    Equivocation,
    StatedReport,
    StatedVote,
    StatementKind,
    stated_report_message,
    vote_message,
)
from swarm_protocol.training_messages import GROUP_PURPOSE, Contribution, Group, Ready, SignedGroup, round_subject

from swarm.newest_items import NewestItems
from swarm.training.round.quorum import electors_of, vote_of_lock
from swarm.training.run.run_config import RunConfig
from swarm.training.state.certificate import RunSignatures

S = TypeVar("S")
MAX_PEERS = 512
"""Peers whose votes and reports are remembered: two full groups."""

MAX_STATEMENTS = 32
"""Votes and reports of one peer: those of some ten attempts, of 300 bytes each."""

MAX_COORDINATORS = 16
MAX_GROUPS = 2
"""Groups that are remembered of one coordinator. One may have 400 KiB."""

Attempted: TypeAlias = tuple[int, int, bytes, bytes | int]
"""The attempt that a statement is about: step, attempt, digest of the initial state, and the resume order or its
number. An honest member makes one statement of each kind about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A signed statement of a member about one attempt. `topic` is the kind of a vote, else empty. `content` must not
    differ between two statements."""

    attempted: Attempted
    topic: str
    content: bytes


def accused_of_equivocation(body: bytes, signatures: RunSignatures) -> tuple[str, int]:
    """Return the accused and the step, unverified. Raises PeerViolation or IntegrityError."""
    case = Equivocation.from_bytes(body)
    return case.peer, _read(case, case.first, signatures).attempted[0]


def check_equivocation(body: bytes, signatures: RunSignatures, config: RunConfig) -> str:
    """Return in words what the member signed twice. Raises PeerViolation or IntegrityError if it proves nothing."""
    case = Equivocation.from_bytes(body)
    if config.min_group == 1:
        raise PeerViolation("in a run with a min_group of 1, members may sign two statements about one attempt")
    one, other = (_read(case, each, signatures, verifies=True) for each in (case.first, case.second))
    if (one.attempted, one.topic) != (other.attempted, other.topic):
        raise PeerViolation("evidence has two statements about different attempts")
    if one.content == other.content:
        raise PeerViolation("evidence has one statement twice")
    step, attempt, *_ = one.attempted
    return f"it signed two different {_IN_WORDS[case.statement]} for attempt {attempt} at outer step {step}"


_IN_WORDS: dict[StatementKind, str] = {"vote": "votes of one kind", "report": "reports", "group": "groups"}


def _read(case: Equivocation, data: bytes, signatures: RunSignatures, *, verifies: bool = False) -> Statement:
    """Return a statement of `case`. With `verifies`, also check that the accused signed it in this run and network.
    Raises PeerViolation or IntegrityError."""
    network_id, run = signatures.network_id, signatures.run
    if case.statement == "group":
        return _read_group(case.peer, data, signatures)
    if case.statement == "vote":
        vote = StatedVote.from_bytes(data)
        message, signature = vote_message(network_id, run, vote), vote.signature
        statement = statement_of_vote(vote)
    else:
        report = StatedReport.from_bytes(data)
        message, signature = stated_report_message(network_id, run, report), report.report.signature
        statement = statement_of_report(report)
        if report.report.peer_id != case.peer:
            raise PeerViolation("evidence has a report of another member")
    if verifies:
        verify(case.peer, message, signature)
    return statement


def statement_of_vote(vote: StatedVote) -> Statement:
    attempted = (vote.step, vote.attempt, vote.state_digest, vote.sequence)
    return Statement(attempted=attempted, topic=vote.kind, content=vote.group_digest + vote.outcome_digest)


def statement_of_report(report: StatedReport) -> Statement:
    attempted = (report.step, report.attempt, report.state_digest, report.sequence)
    content = stated_report_message("", "", report)  # all that the signature covers
    return Statement(attempted=attempted, topic="", content=content)


def statement_of_group(group: Group) -> Statement:
    attempted = (group.step, group.attempt, group.state_digest, group.order)
    return Statement(attempted=attempted, topic="", content=group.to_bytes())


def _read_group(peer: str, data: bytes, signatures: RunSignatures) -> Statement:
    envelope = unseal(data, purpose=GROUP_PURPOSE, network_id=signatures.network_id, now=issued_at(data))
    group = Group.from_bytes(envelope.payload)
    subject = round_subject(signatures.run, group.step, group.attempt)
    if (envelope.peer_id, group.run, envelope.subject) != (peer, signatures.run, subject):
        raise PeerViolation("evidence has a group of another run, or that another member signed")
    return statement_of_group(group)


class EquivocationWatch:
    """Calls `found` with two statements of one peer that differ, once for each peer and step, but never for `me`."""

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
        """Note a group and its reports."""
        other = self._groups.other(signed.signer, statement_of_group(signed.group), signed)
        if other is not None:
            self._tell("group", signed.signer, other.group.step, (other.data, signed.data))
        for member in signed.group.members:
            self._report(signed.group, member, signed.sequence)

    def lock(self, lock: Lock, origin: SignedGroup, roster: tuple[str, ...]) -> None:
        """Note the prepare votes in `lock`, which is of an outcome of the group `origin`."""
        electors, vote = electors_of(roster, origin.group), vote_of_lock(lock, origin)
        for each in lock.votes:
            self.vote(electors[each.place], replace(vote, signature=each.signature))

    def certificate(self, certificate: Certificate, signed: SignedGroup) -> None:
        """Note the commit votes of `certificate`, whose group is `signed`."""
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
    """The last statements of the last peers, by attempt and topic."""

    def __init__(self, max_peers: int, max_statements: int, is_heard: Callable[[str], bool]) -> None:
        self._max_statements = max_statements
        self._is_heard = is_heard
        self._of_peer = NewestItems[str, NewestItems[tuple[object, str], tuple[bytes, S]]](max_peers)

    def other(self, peer: str, statement: Statement, item: S) -> S | None:
        """Return a different statement of `peer` about the same attempt, or None. The first statement about each is
        remembered."""
        if peer not in self._of_peer and not self._is_heard(peer):
            return None
        known = self._of_peer[peer] = self._of_peer.get(peer) or NewestItems(self._max_statements)
        key = (statement.attempted, statement.topic)
        if key in known:
            content, earlier = known[key]
            return earlier if content != statement.content else None
        known[key] = (statement.content, item)
        return None
