"""Signed groups and votes, and the certificates made of them: what proves that a state was committed.

A certificate is a signed group and two thirds of its members' votes for one outcome. It names the state, so whoever
holds one can check a state that comes from strangers. It does not prove that the members were honest, nor that they are
the run's: for that, enough members of an earlier state, which is trusted, must be among its voters (`seat.follows`).

Two certificates of one run can contradict each other only if it has two first groups, or if its `min_group` is 1. Then
all follow the one of higher `rank`: more outer steps, the later admission, more members.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, seal, unseal
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import (
    GROUP_PURPOSE,
    VOTE_PURPOSE,
    Certificate,
    Group,
    Outcome,
    Vote,
    round_subject,
)

from swarm.training.round_events import Signed
from swarm.training.vote import tally

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notary:
    """Seals and checks in the name of one member, of one run in one network.

    `min_group` and `last_step` are the run's own terms, which no certificate of honest members breaks.
    """

    identity: Identity
    network_id: str
    run: str
    min_group: int = 1
    last_step: int = limits.MAX_OUTER_STEP

    def sign_group(self, group: Group, now: float) -> Signed:
        data = self._seal(GROUP_PURPOSE, group, now)
        return Signed(group=group, signer=self.identity.peer_id, data=data, digest=hashlib.sha256(data).digest())

    def sign_vote(self, vote: Vote, now: float) -> bytes:
        return self._seal(VOTE_PURPOSE, vote, now)

    def read_group(self, data: bytes, now: float) -> Signed:
        """Raises PeerViolation or IntegrityError, also if it resumes an outcome of another step or state."""
        envelope = unseal(data, purpose=GROUP_PURPOSE, network_id=self.network_id, now=now)
        group = Group.from_bytes(envelope.payload)
        self._check_subject(envelope, group)
        origin = None
        if group.resumes is not None:
            origin = self.check_origin(group.origin, group.resumes, group.step, group.state_digest, now)
        digest = hashlib.sha256(data).digest()
        return Signed(group=group, signer=envelope.peer_id, data=data, digest=digest, origin=origin)

    def read_vote(self, data: bytes, now: float) -> tuple[str, Vote]:
        """The voter and the vote. Raises PeerViolation or IntegrityError."""
        envelope = unseal(data, purpose=VOTE_PURPOSE, network_id=self.network_id, now=now)
        vote = Vote.from_bytes(envelope.payload)
        self._check_subject(envelope, vote)
        return envelope.peer_id, vote

    def check_origin(self, origin: bytes, outcome: Outcome, step: int, state_digest: bytes, now: float) -> Signed:
        """The group that `outcome` is from. Raises PeerViolation unless it started at `state_digest` for `step`."""
        if hashlib.sha256(origin).digest() != outcome.origin_digest:
            raise PeerViolation("an outcome comes with another group than it names")
        signed = self.read_group(origin, now)
        group = signed.group
        if group.resumes is not None or (group.step, group.state_digest) != (step, state_digest):
            raise PeerViolation("an outcome comes from a group of another step or state")
        if len(outcome.part_digests) != len(group.part_values):
            raise PeerViolation("an outcome has another number of parts than its group")
        return signed

    def check_certificate(self, data: bytes, now: float) -> Proof:
        """Raises PeerViolation or IntegrityError unless `data` proves an outcome that this run allows."""
        certificate = Certificate.from_bytes(data)
        signed = self.read_group(certificate.group, now)
        votes = {}
        for each in certificate.votes:
            voter, vote = self.read_vote(each, now)
            if vote.group_digest == signed.digest and voter in signed.group.peer_ids:
                votes[voter] = vote
        result = tally(signed.group.peer_ids, votes, ())
        if result.decided is None:
            raise PeerViolation(f"a certificate proves nothing: {result.reason}")
        group, outcome = signed.group, result.decided
        origin = self.check_origin(group.origin or signed.data, outcome, group.step, group.state_digest, now).group
        if len(group.members) < self.min_group or len(origin.members) < self.min_group or group.step > self.last_step:
            raise PeerViolation("a certificate is of a group or step that the run does not allow")
        voters = tuple(sorted(voter for voter, vote in votes.items() if vote.outcome == outcome))
        return Proof(certificate=data, attempt=group.attempt, origin=origin, outcome=outcome, voters=voters)

    def proof_of(self, state_digest: bytes, data: bytes, now: float) -> Proof | None:
        """What `data`, kept with that state, proves; None if there is none, or it holds no more.

        Raises IntegrityError if it is another state's.
        """
        if not data:
            return None
        try:
            proof = self.check_certificate(data, now)
        except PeerViolation as error:
            # too old, or of another network: the state is still one to go on from
            logger.warning("going on without a certificate: %s", error)
            return None
        if proof.outcome.state_digest != state_digest:
            raise IntegrityError("the certificate to resume with is of another state", remedy="resume without it")
        return proof

    def _seal(self, purpose: str, message: Group | Vote, now: float) -> bytes:
        envelope = seal(
            self.identity,
            purpose=purpose,
            network_id=self.network_id,
            subject=round_subject(message.run, message.step, message.attempt),
            payload=message.to_bytes(),
            issued_at=now,
            expires_at=now + limits.CERTIFICATE_LIFETIME_S,
        )
        return envelope.to_bytes()

    def _check_subject(self, envelope: Envelope, message: Group | Vote) -> None:
        if message.run != self.run or envelope.subject != round_subject(message.run, message.step, message.attempt):
            raise PeerViolation("a group or vote is for another round", peer_id=envelope.peer_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a valid certificate says. `origin` is the group whose contributions the outcome reduces; `voters` had all
    its parts."""

    certificate: bytes
    attempt: int
    origin: Group
    outcome: Outcome
    voters: tuple[str, ...]

    @property
    def roster(self) -> tuple[str, ...]:
        """The members of the state that was committed, on whom what follows depends."""
        return self.origin.roster

    @property
    def outer_step(self) -> int:
        """Of the state that was committed: admitting members is no outer step."""
        return self.origin.step if self.origin.num_tokens else self.origin.step - 1

    @property
    def next_attempt(self) -> int:
        """Where the next round begins: admitting members does not end the step."""
        return 0 if self.origin.num_tokens else self.attempt + 1

    @property
    def rank(self) -> tuple[int, int, int, bytes]:
        complement = bytes(255 - each for each in self.outcome.state_digest)
        return (self.outer_step, self.next_attempt, len(self.origin.members), complement)
