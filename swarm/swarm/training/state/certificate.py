"""Certificates, which prove that a state was committed, and all other signatures in a run: made and checked here.

A certificate is a signed group and the commit votes of two thirds of its deciding members for one outcome. It names the
state, so that its holder can check a state from strangers. It does not prove that the members were honest, or that they
are the run's. For that, enough members of a trusted earlier state must be among its voters (`state_sync.follows`). If
too many of these have been replaced, the certificates in between show the way, link by link: each replica keeps a
`CertificateHistory` (`certificate_history`) to show to others.

A resume order may replace a certificate: the run's author signs that the named members go on from a state without the
others. All later certificates contain it, and outrank those with only an earlier order, whatever their step.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias, TypeVar

from swarm_protocol import limits
from swarm_protocol.commit_messages import (
    ENDORSEMENT_PURPOSE,
    RESUME_PURPOSE,
    Certificate,
    Endorsement,
    Lock,
    Outcome,
    PlacedSignature,
    ResumeOrder,
    Vote,
)
from swarm_protocol.envelope import Envelope, seal_now, unseal
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.identity import Identity, short_id, verify
from swarm_protocol.proof_messages import FINDING_PURPOSE, IntervalFinding, report_message, slices_message, vote_message
from swarm_protocol.reduction_messages import PART_PURPOSE, PartStatement
from swarm_protocol.run_credentials import RunCredential, RunRevocation, check_credential, read_revocation
from swarm_protocol.training_messages import (
    GROUP_PURPOSE,
    Contribution,
    Group,
    Ready,
    SignedGroup,
    SliceCommitment,
    round_subject,
)

from swarm.training.round.quorum import Succession, electors_of, tally, vote_of_lock
from swarm.training.run.signed_run import SignedRun
from swarm.training.standing.entrance import Entrance
from swarm.training.standing.standings import lets_begin
from swarm.training.state.certificate_history import Proof

S = TypeVar("S", PartStatement, IntervalFinding)
Sealed: TypeAlias = Group | PartStatement | IntervalFinding | ResumeOrder | Endorsement
_PURPOSES: Mapping[type[Sealed], str] = {
    Group: GROUP_PURPOSE,
    PartStatement: PART_PURPOSE,
    IntervalFinding: FINDING_PURPOSE,
    ResumeOrder: RESUME_PURPOSE,
    Endorsement: ENDORSEMENT_PURPOSE,
}

logger = logging.getLogger(__name__)

NUM_PARSED_GROUPS = 8
"""Number of parsed groups that are cached. The members of a round show certificates with different votes but the same
group, which may name thousands of followers in up to 400 KiB."""

CREDENTIAL_MARGIN_S = 60.0
"""A coordinator accepts no credential that expires within this time: it must be valid when the group is signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSignatures:
    """Signs reports, groups, votes and resume orders as one member of one run in one network, and checks those of
    others.

    `of_run` takes the fields from the run. A certificate that breaks the run's `succession`, `last_step`, `admission`
    or `entrance` is refused. `genesis` is the digest of the run's first state; empty if its author has not pinned it.
    """

    identity: Identity
    network_id: str
    run: str
    succession: Succession = field(default_factory=Succession)
    last_step: int = limits.MAX_OUTER_STEP
    admission: tuple[str, ...] = ()
    author: str = ""
    inviters: tuple[str, ...] = ()
    entrance: Entrance = field(default_factory=Entrance)
    genesis: bytes = b""

    @classmethod
    def of_run(cls, run: SignedRun, identity: Identity, network_id: str) -> RunSignatures:
        config = run.config
        return cls(
            identity=identity,
            network_id=network_id,
            run=run.run_id,
            succession=Succession.of(config),
            last_step=config.outer_steps,
            admission=config.only_named,
            author=run.peer_id,
            inviters=(run.peer_id, *config.inviters) if config.entrance.welcomes else (),
            entrance=config.entrance,
            genesis=bytes.fromhex(config.start.genesis),
        )

    def admits(self, *peers: str) -> bool:
        """Return whether the run allows all of `peers` to be members."""
        return not self.admission or set(peers) <= set(self.admission)

    def sign_group(self, group: Group, now: float, sequence: int = 0) -> SignedGroup:
        """Sign a group and this member's own report in it. `sequence` is that of the resume order that the group
        names."""
        me = self.identity.peer_id
        members = tuple(
            self._sign_contribution(group, each, sequence) if each.peer_id == me else each for each in group.members
        )
        group = replace(group, members=members)
        data = self.sign(group, now)
        digest = hashlib.sha256(data).digest()
        return SignedGroup(group=group, signer=me, data=data, digest=digest, sequence=sequence)

    def sign_report(self, ready: Ready) -> Ready:
        """Return `ready` with this member's signature."""
        report = ready.contribution_of(self.identity.peer_id)
        return replace(ready, signature=self._sign_contribution(ready, report, ready.sequence).signature)

    def check_report(self, ready: Ready, peer: str) -> None:
        """Raises PeerViolation unless `peer` has signed its report `ready`."""
        self._check_contribution(ready, ready.contribution_of(peer), ready.sequence)

    def check_revocation(self, data: bytes, now: float) -> RunRevocation | None:
        """Return what `data` revokes; None if it is empty. Raises PeerViolation or IntegrityError unless the run's
        author signed it."""
        if not data:
            return None
        return read_revocation(data, self.run, network_id=self.network_id, author=self.author, now=now)

    def check_credentials(self, credentials: Iterable[RunCredential], at: float, *, margin_s: float = 0.0) -> None:
        """Raises PeerViolation or IntegrityError unless all `credentials` are genuine, of this run, and valid at `at`
        and for `margin_s` after it."""
        for each in credentials:
            if not self.inviters:
                raise PeerViolation("it shows a credential, but the run accepts none", peer_id=each.peer_id)
            grant = check_credential(each, self.run, network_id=self.network_id, inviters=self.inviters, at=at)
            if grant.expires_at <= at + margin_s:
                raise PeerViolation("its invitation is about to expire", peer_id=each.peer_id)

    def check_reports(self, signed: SignedGroup) -> None:
        """Raises PeerViolation, which names the coordinator, unless each member signed its report in the group for this
        attempt."""
        sequence = signed.sequence
        for member in signed.group.members:
            try:
                self._check_contribution(signed.group, member, sequence)
            except PeerViolation as error:
                reason = f"its group has a report that {short_id(member.peer_id)} did not sign"
                raise PeerViolation(reason, peer_id=signed.signer) from error

    def _sign_contribution(self, place: Group | Ready, report: Contribution, sequence: int) -> Contribution:
        return replace(report, signature=self.identity.sign(report_message(self.network_id, place, sequence, report)))

    def _check_contribution(self, place: Group | Ready, report: Contribution, sequence: int) -> None:
        try:
            verify(report.peer_id, report_message(self.network_id, place, sequence, report), report.signature)
        except IntegrityError as error:
            raise PeerViolation("it has not signed its report", peer_id=report.peer_id) from error

    def sign_vote(self, vote: Vote) -> Vote:
        return replace(vote, signature=self.identity.sign(vote_message(self.network_id, vote.run, vote)))

    def check_vote(self, vote: Vote, voter: str) -> None:
        """Raises PeerViolation or IntegrityError unless `vote` is a vote of `voter` in this run."""
        if vote.run != self.run:
            raise PeerViolation("a vote is of another run", peer_id=voter)
        verify(voter, vote_message(self.network_id, vote.run, vote), vote.signature)

    def check_lock(self, lock: Lock, origin: SignedGroup, roster: Sequence[str]) -> None:
        """Raises PeerViolation or IntegrityError unless enough of `roster`, the members of the previous state, voted
        for the lock's outcome, which is from the group `origin`."""
        electors, group = electors_of(roster, origin.group), origin.group
        vote = vote_of_lock(lock, origin)
        voters = self._voters(vote, lock.votes, electors)
        if lock.attempt < group.attempt or not self.succession.is_enough(electors, voters):
            raise PeerViolation(f"a lock proves nothing: {len(voters)} of {len(electors)} members voted for it")

    def _voters(self, vote: Vote, votes: Iterable[PlacedSignature], peers: Sequence[str]) -> tuple[str, ...]:
        """Return the `peers` that signed these `votes`. Raises PeerViolation or IntegrityError if one is not valid."""
        message, voters = vote_message(self.network_id, vote.run, vote), []
        for each in votes:
            if each.place >= len(peers):
                raise PeerViolation("a vote names a place outside the group")
            verify(peers[each.place], message, each.signature)
            voters.append(peers[each.place])
        return tuple(voters)

    def sign_slices(self, step: int, state_digest: bytes, root: bytes) -> SliceCommitment:
        """Commit to this member's slices of `step`, whose hash tree has `root`."""
        message = slices_message(self.network_id, self.run, step, state_digest, root)
        return SliceCommitment(root=root, signature=self.identity.sign(message))

    def check_slices(self, member: Contribution | Ready, peer: str, step: int, state_digest: bytes) -> None:
        """Raises PeerViolation unless `peer` has committed to its slices, or `member` says that it does not
        contribute."""
        if not member.num_tokens:
            return
        if member.commitment is None:
            raise PeerViolation("it contributes, but has not committed to its slices", peer_id=peer)
        try:
            message = slices_message(self.network_id, self.run, step, state_digest, member.commitment.root)
            verify(peer, message, member.commitment.signature)
        except IntegrityError as error:
            raise PeerViolation("it has not signed the commitment to its slices", peer_id=peer) from error

    def check_commitments(self, signed: SignedGroup) -> None:
        """Raises PeerViolation, which names the coordinator, unless all contributors have committed to their slices."""
        group = signed.group
        for member in group.contributors:
            try:
                self.check_slices(member, member.peer_id, group.step, group.state_digest)
            except PeerViolation as error:
                reason = f"its group has an invalid member: {error.message}"
                raise PeerViolation(reason, peer_id=signed.signer) from error

    def sign(self, message: Sealed, now: float) -> bytes:
        """Return `message` in an envelope that this member has signed. Orders and endorsements are for the run's author
        to sign."""
        return seal_now(
            self.identity,
            self.network_id,
            purpose=_PURPOSES[type(message)],
            subject=subject_of(message),
            payload=message.to_bytes(),
            now=now,
            lifetime_s=limits.CERTIFICATE_LIFETIME_S,
        )

    def read(self, kind: type[S], data: bytes, now: float) -> tuple[str, S]:
        """Return the signer and the content of an envelope. Raises PeerViolation or IntegrityError."""
        envelope = unseal(data, purpose=_PURPOSES[kind], network_id=self.network_id, now=now)
        content = kind.from_bytes(envelope.payload)
        self._check_subject(envelope, content)
        return envelope.peer_id, content

    def read_order(self, data: bytes, now: float) -> ResumeOrder:
        """Return the resume order in `data`. Raises PeerViolation or IntegrityError unless the run's author signed it
        and it fits the run."""
        envelope = unseal(data, purpose=RESUME_PURPOSE, network_id=self.network_id, now=now)
        order = ResumeOrder.from_bytes(envelope.payload)
        if envelope.peer_id != self.author:
            raise PeerViolation("a resume order is not signed by the run's author", peer_id=envelope.peer_id)
        if (order.run, envelope.subject) != (self.run, subject_of(order)) or order.outer_step >= self.last_step:
            raise PeerViolation(
                "a resume order is for another run, or names a step after which the run is over",
                peer_id=envelope.peer_id,
            )
        if not self.admits(*order.roster):
            raise PeerViolation("a resume order names a peer that the run does not admit", peer_id=envelope.peer_id)
        return order

    def read_group(self, data: bytes, now: float, *, is_origin: bool = False) -> SignedGroup:
        """Return the signed group in `data`. Raises PeerViolation or IntegrityError, also if the group resumes an
        outcome of another step or state, or any outcome with `is_origin`."""
        envelope = unseal(data, purpose=GROUP_PURPOSE, network_id=self.network_id, now=now)
        group = _parsed_group(envelope.payload)
        self._check_subject(envelope, group)
        if len(group.credentials) > limits.MAX_CREDENTIALS:  # each has signatures to check
            raise PeerViolation("a group has more credentials than it may", peer_id=envelope.peer_id)
        self.check_credentials(group.credentials, envelope.issued_at)
        self.check_revocation(group.revocation, now)
        origin = None
        if group.lock is not None:
            if is_origin:
                raise PeerViolation("an outcome comes from a group that resumes another one", peer_id=envelope.peer_id)
            origin = self.check_origin(group.origin, group.lock.outcome, group.step, group.state_digest, now)
        order = self.read_order(group.order, now) if group.order else None
        if order is not None and group.step <= order.outer_step:
            raise PeerViolation("a group is of a step before the resume order that it names", peer_id=envelope.peer_id)
        return SignedGroup(
            group=group,
            signer=envelope.peer_id,
            data=data,
            digest=hashlib.sha256(data).digest(),
            origin=origin,
            order=order,
            sequence=order.sequence if order else 0,
        )

    def check_origin(self, origin: bytes, outcome: Outcome, step: int, state_digest: bytes, now: float) -> SignedGroup:
        """Return the group in `origin`. Raises PeerViolation unless `outcome` is from it and it started at
        `state_digest` for `step`."""
        if hashlib.sha256(origin).digest() != outcome.origin_digest:
            raise PeerViolation(_OTHER_GROUP)
        signed = self.read_group(origin, now, is_origin=True)
        _check_outcome(outcome, signed, step, state_digest)
        return signed

    def check_certificate(self, data: bytes, now: float) -> Proof:
        """Return what `data` proves. Raises PeerViolation or IntegrityError unless it is an outcome that this run
        allows."""
        certificate = Certificate.from_bytes(data)
        if certificate.order:
            return Proof.of_order(self.read_order(certificate.order, now), certificate.order)
        signed, outcome = self.read_group(certificate.group, now), certificate.outcome
        group = signed.group
        assert outcome is not None
        vote = signed.vote(outcome, "commit")
        deciding = set(group.deciding)
        voters = tuple(each for each in self._voters(vote, certificate.votes, group.peer_ids) if each in deciding)
        result = tally(deciding, dict.fromkeys(voters, vote), ())
        if result.decided is None:
            raise PeerViolation(f"a certificate proves nothing: {result.reason}")
        if group.resumes not in {None, outcome}:
            raise PeerViolation("a certificate is of another outcome than its group resumes")
        if group.origin:
            origin = self.check_origin(group.origin, outcome, group.step, group.state_digest, now).group
        else:
            _check_outcome(outcome, signed, group.step, group.state_digest)
            origin = group
        fewest = min(len(group.members), len(origin.members))
        if fewest < self.succession.min_group or group.step > self.last_step:
            raise PeerViolation("a certificate is of a group or step that the run does not allow")
        if origin.order != group.order:
            raise PeerViolation("a certificate resumes an outcome from before the last resume order")
        if not self.admits(*group.peer_ids, *origin.peer_ids):
            raise PeerViolation("a certificate is of a group with a member that the run does not admit")
        if not all(lets_begin(self.entrance, each) for each in (group, origin) if self._is_first(each)):
            raise PeerViolation("a certificate is of a first group with a member that was not invited")
        return Proof(
            certificate=data, attempt=group.attempt, origin=origin, outcome=outcome, voters=voters, order=signed.order
        )

    def _is_first(self, group: Group) -> bool:
        """Return whether `group` starts at the run's first state. Newcomers in a later group follow from its state."""
        return bool(self.genesis) and group.state_digest == self.genesis and not group.order

    def formed_at(self, proof: Proof, now: float) -> float:
        """Return when the group whose contributions count was signed, by its coordinator's clock. `proof` must not be a
        resume order."""
        data = Certificate.from_bytes(proof.certificate).group
        origin = self.read_group(data, now).group.origin or data
        return unseal(origin, purpose=GROUP_PURPOSE, network_id=self.network_id, now=now).issued_at

    def proof_of(self, state_digest: bytes, data: bytes, now: float) -> Proof | None:
        """Return what `data`, a certificate kept with the state, proves; None if it is empty or no longer valid.

        Raises IntegrityError if it is of another state.
        """
        if not data:
            return None
        try:
            proof = self.check_certificate(data, now)
        except PeerViolation as error:
            # too old, or of another network: the member can still go on from the state
            logger.warning("continuing without a certificate: %s", error)
            return None
        if proof.outcome.state_digest != state_digest:
            raise IntegrityError("the certificate to resume with is of another state", remedy="resume without it")
        return proof

    def _check_subject(self, envelope: Envelope, message: Group | PartStatement | IntervalFinding) -> None:
        if message.run != self.run or envelope.subject != subject_of(message):
            raise PeerViolation("a group or statement is for another round", peer_id=envelope.peer_id)


_OTHER_GROUP = "an outcome comes with another group than it names"


@lru_cache(maxsize=NUM_PARSED_GROUPS)
def _parsed_group(payload: bytes) -> Group:
    return Group.from_bytes(payload)


def _check_outcome(outcome: Outcome, origin: SignedGroup, step: int, state_digest: bytes) -> None:
    """Raises PeerViolation unless `outcome` is from the group `origin`, and `origin` started at `state_digest` for
    `step`."""
    group = origin.group
    if origin.digest != outcome.origin_digest:
        raise PeerViolation(_OTHER_GROUP)
    if (group.step, group.state_digest) != (step, state_digest):
        raise PeerViolation("an outcome comes from a group of another step or state")
    if len(outcome.part_digests) != len(group.part_values):
        raise PeerViolation("an outcome has another number of parts than its group")


def subject_of(message: Sealed) -> str:
    """Return the subject under which `message` is signed."""
    match message:
        case ResumeOrder():
            return f"{message.run}/resume/{message.sequence}"
        case Endorsement():
            return f"{message.run}/endorsement/{message.sequence}"
        case _:
            return round_subject(message.run, message.step, message.attempt)
