"""Judge a wrong proof of possession: anybody can who has the evidence, which holds the publisher's manifest. Pure.

An honest server checks its files against the manifest before it serves them, and signs paths in the trees that it has
checked, so that it signs no wrong one, no matter who made the manifest. A server without the files need not sign: it
can send a wrong chunk with a right path, or nothing. That convicts nobody, and only who asked knows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol.envelope import Envelope, issued_at
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.manifest_messages import PossessionResponse, PublishedManifest, open_manifest
from swarm_protocol.proof_messages import WRONG_POSSESSION, Evidence
from swarm_protocol.served_evidence_messages import WrongPossession

from swarm.serving.manifest.possession import read_statement, wrong_file
from swarm.trust.reputation import BAR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerVerdict:
    """Holds what evidence proves: at `at`, in Unix seconds, the server `peer_id` signed what is not so. `reason` says
    it in words."""

    peer_id: str
    model: str
    at: float
    reason: str

    @property
    def until(self) -> float:
        """Return until when the server is not asked, in Unix seconds. No later proof ends it: see `docs/decisions`."""
        return self.at + BAR_S


def possession_evidence(published: PublishedManifest, peer_id: str, answer: bytes, network_id: str) -> bytes:
    """Return the encoded Evidence that `answer`, a PossessionResponse that `peer_id` gave, amounts to.

    No bytes if it does not convict that server: it is malformed, signed by nobody or by another, or its paths are
    right.
    """
    try:
        statement = PossessionResponse.from_bytes(answer).statement
        wrong = WrongPossession(manifest=published.signed, statement=statement)
        verdict = check_possession(wrong, network_id)
    except (PeerViolation, IntegrityError):
        return b""
    return wrong.evidence().to_bytes() if verdict.peer_id == peer_id else b""


def read_possession(data: bytes) -> WrongPossession:
    """Return what encoded Evidence about a server holds, unchecked. Raises PeerViolation."""
    if len(data) > WrongPossession.MAX_BYTES:
        raise PeerViolation(f"evidence about a server has {len(data)} bytes, more than {WrongPossession.MAX_BYTES}")
    evidence = Evidence.from_bytes(data)
    if evidence.kind != WRONG_POSSESSION:
        raise PeerViolation(f"evidence is of the kind {evidence.kind!r}, which is not about a server's files")
    return WrongPossession.from_bytes(evidence.body)


def accused(wrong: WrongPossession) -> tuple[str, float]:
    """Return whom the evidence is against, and when that says that it signed, before anything is checked. Raises
    PeerViolation."""
    try:
        envelope = Envelope.parse(wrong.statement)
    except ValueError as error:
        raise PeerViolation(f"evidence has no statement: {error}") from error
    return envelope.peer_id, envelope.issued_at


def check_possession(wrong: WrongPossession, network_id: str) -> ServerVerdict:
    """Return what the evidence proves, however old it is. Blocks for milliseconds.

    Raises PeerViolation or IntegrityError if it proves nothing: it is malformed, of another network, not signed, or
    right.
    """
    published = open_manifest(wrong.manifest)
    envelope, signed = read_statement(wrong.statement, network_id, issued_at(wrong.statement))
    if signed.manifest != published.digest or len(signed.paths) != len(signed.drawn):
        raise PeerViolation("the statement is of another manifest, or not whole", peer_id=envelope.peer_id)
    name = wrong_file(published.manifest, signed.drawn, signed.paths)
    if name is None:
        raise PeerViolation("the statement is right", peer_id=envelope.peer_id)
    return ServerVerdict(
        peer_id=envelope.peer_id,
        model=published.manifest.name,
        at=envelope.issued_at,
        reason=f"signed a wrong proof that it holds {name} of {published.manifest.name}",
    )
