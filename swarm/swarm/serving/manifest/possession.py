"""Proofs that a server holds the files that it announces: the draw of chunks, one request, and the check of an answer.

This is provable data possession (Ateniese et al. 2007) in its simplest form, with Merkle trees: the asker needs only
the manifest. A server that lacks a share p of its blocks' bytes passes k draws with probability (1 - p)^k. A proof
shows that the server could get the publisher's bytes within the deadline. It does not show that the server computes
with them, or that it made its quantized weights from them.

A wrong proof convicts a server. Anyone can check the evidence, since it contains the publisher's manifest. An honest
server checks its files against the manifest before it serves them, and signs only paths in the checked trees, so it
never signs a wrong one, whoever made the manifest. A server without the files need not sign: it can send a wrong chunk
with a correct path, or nothing. This convicts nobody, and only the asker knows it. No state.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, OutOfTime, issued_at, unseal
from swarm_protocol.errors import IntegrityError, PeerViolation, SwarmError
from swarm_protocol.hash_tree import leaf_digest, root_above
from swarm_protocol.manifest_messages import (
    CHUNK_BYTES,
    POSSESSION_METHOD,
    POSSESSION_PURPOSE,
    ChunkPath,
    DrawnChunk,
    ModelManifest,
    PossessionRequest,
    PossessionResponse,
    PossessionStatement,
    PublishedManifest,
    open_manifest,
)
from swarm_protocol.proof_messages import WRONG_POSSESSION, Evidence
from swarm_protocol.records import ServeRecord
from swarm_protocol.served_evidence_messages import WrongPossession

from swarm.network.interface import Network
from swarm.trust.reputation import BAR_S

NUM_DRAWN = 4
"""Chunks of one proof, 256 KiB together."""

STATEMENT_LIFETIME_S = 30 * 86400.0
"""Time for which a signed answer is valid."""

MAX_AGE_S = limits.MAX_RECORD_LIFETIME_S
"""Maximum age of an answer: a backdated answer would convict its signer for a shorter time. A server whose clock is
that far behind is not listed anyway."""

DEADLINE_S = 30.0
"""256 KiB at 70 kbit/s. A slower server is useless for answers, too."""

ProofOutcome: TypeAlias = Literal["proven", "failed", "unanswered"]


def draw(
    manifest: ModelManifest, start: int, end: int, rng: random.Random, num_drawn: int = NUM_DRAWN
) -> tuple[DrawnChunk, ...]:
    """Draw up to `num_drawn` chunks of the tensors of blocks `[start, end)`, each byte as likely as any other."""
    ranges = list(manifest.ranges_of(start, end))
    chosen = rng.choices(ranges, weights=[each.num_bytes for each in ranges], k=num_drawn)
    places = [(each.file, (each.start + rng.randrange(each.num_bytes)) // CHUNK_BYTES) for each in chosen]
    return tuple(DrawnChunk(file=file, index=index) for file, index in dict.fromkeys(places))


def check_answer(
    manifest: ModelManifest,
    request: PossessionRequest,
    answer: bytes,
    *,
    asker: str,
    peer_id: str,
    network_id: str,
    now: float,
) -> bytes:
    """Return the signed statement of an answer that proves possession.

    Raises PeerViolation for an answer that is malformed or to another request, OutOfTime for one that is not valid at
    `now`, and IntegrityError for one whose chunks differ from the manifest.
    """
    response = PossessionResponse.from_bytes(answer)
    envelope, statement = read_statement(response.statement, network_id, now)
    if envelope.issued_at < now - MAX_AGE_S:
        raise OutOfTime("the answer was signed long ago, or a clock is wrong", peer_id=peer_id)
    asked = (request.manifest, request.nonce, asker, request.drawn)
    if envelope.peer_id != peer_id:
        raise PeerViolation("the answer is signed by another peer", peer_id=peer_id)
    if (statement.manifest, statement.nonce, statement.asker, statement.drawn) != asked:
        raise PeerViolation("the answer is to another request", peer_id=peer_id)
    if not len(statement.paths) == len(response.chunks) == len(request.drawn):
        raise PeerViolation("the answer has another number of chunks than were drawn", peer_id=peer_id)
    for drawn, path, chunk in zip(statement.drawn, statement.paths, response.chunks, strict=True):
        if len(chunk) != manifest.weights[drawn.file].chunk_bytes(drawn.index) or leaf_digest(chunk) != path.digest:
            raise PeerViolation(
                f"a chunk of {manifest.weights[drawn.file].name} is not what was signed", peer_id=peer_id
            )
    if (name := wrong_file(manifest, statement.drawn, statement.paths)) is not None:
        raise IntegrityError(f"{name} is not the file that {manifest.publisher} published", peer_id=peer_id)
    return response.statement


def read_statement(data: bytes, network_id: str, now: float) -> tuple[Envelope, PossessionStatement]:
    """Return the signed statement in `data`, with its envelope. Raises PeerViolation or IntegrityError unless it is
    signed for this network and valid at `now`."""
    envelope = unseal(
        data,
        purpose=POSSESSION_PURPOSE,
        network_id=network_id,
        now=now,
        max_payload_bytes=PossessionStatement.MAX_BYTES,
        max_lifetime_s=STATEMENT_LIFETIME_S,
    )
    return envelope, PossessionStatement.from_bytes(envelope.payload)


def wrong_file(manifest: ModelManifest, drawn: Sequence[DrawnChunk], paths: Sequence[ChunkPath]) -> str | None:
    """Return the name of the first file whose root does not follow from its path; None if all do."""
    for each, path in zip(drawn, paths, strict=True):
        if each.file >= len(manifest.weights):
            return f"file {each.file}"
        file = manifest.weights[each.file]
        try:
            root = root_above(file.num_chunks, each.index, path.digest, path.proof)
        except ValueError:
            return file.name
        if root != file.root:
            return file.name
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedProof:
    """The result of a request. It `failed` if the `answer` is wrong or unusable. `evidence` convicts the server by the
    answer, and is empty if nothing does. `error` is the reason why the proof failed or is missing."""

    outcome: ProofOutcome
    answer: bytes = b""
    evidence: bytes = b""
    error: SwarmError | None = None


async def ask_for_proof(
    network: Network,
    peer_id: str,
    record: ServeRecord,
    published: PublishedManifest,
    rng: random.Random,
    *,
    num_drawn: int = NUM_DRAWN,
) -> AskedProof:
    """Ask the server of `record` for `num_drawn` chunks of its blocks, within DEADLINE_S. A server that announces
    blocks beyond the manifest has failed, and is not asked."""
    if record.end > published.manifest.num_blocks:
        error = PeerViolation(
            f"it announces blocks up to {record.end} of {published.manifest.num_blocks}", peer_id=peer_id
        )
        return AskedProof(outcome="failed", error=error)
    request = PossessionRequest(
        manifest=published.digest,
        nonce=secrets.token_bytes(limits.DIGEST_BYTES),
        drawn=draw(published.manifest, record.start, record.end, rng, num_drawn),
    )
    try:
        answer = await network.call(
            peer_id,
            f"{POSSESSION_METHOD}/{published.manifest.name}",
            request.to_bytes(),
            timeout_s=DEADLINE_S,
            max_bytes=PossessionResponse.MAX_BYTES,
        )
    except SwarmError as error:
        return AskedProof(outcome="unanswered", error=error)
    try:
        check_answer(
            published.manifest,
            request,
            answer,
            asker=network.peer_id,
            peer_id=peer_id,
            network_id=network.network_id,
            now=network.now(),
        )
    except (IntegrityError, PeerViolation) as error:
        evidence = possession_evidence(published, peer_id, answer, network.network_id)
        # this node's clock may be wrong, and then all servers would fail
        is_failed = bool(evidence) or not isinstance(error, OutOfTime)
        return AskedProof(
            outcome="failed" if is_failed else "unanswered", answer=answer, evidence=evidence, error=error
        )
    return AskedProof(outcome="proven", answer=answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerVerdict:
    """The finding of evidence: at `at`, in Unix seconds, the server `peer_id` signed something false. `reason` says
    what, in words."""

    peer_id: str
    model: str
    at: float
    reason: str

    @property
    def until(self) -> float:
        """The time until which the server is not used, in Unix seconds. A later proof does not end it: see
        `docs/decisions`."""
        return self.at + BAR_S


def possession_evidence(published: PublishedManifest, peer_id: str, answer: bytes, network_id: str) -> bytes:
    """Return encoded Evidence from `answer`, a PossessionResponse of `peer_id`.

    Empty if the answer does not convict that server: it is malformed, unsigned or signed by another peer, or its paths
    are correct.
    """
    try:
        statement = PossessionResponse.from_bytes(answer).statement
        wrong = WrongPossession(manifest=published.signed, statement=statement)
        verdict = check_possession(wrong, network_id)
    except (PeerViolation, IntegrityError):
        return b""
    return wrong.evidence().to_bytes() if verdict.peer_id == peer_id else b""


def read_possession(data: bytes) -> WrongPossession:
    """Return the contents of encoded Evidence about a server, unchecked. Raises PeerViolation."""
    if len(data) > WrongPossession.MAX_BYTES:
        raise PeerViolation(f"evidence about a server has {len(data)} bytes, more than {WrongPossession.MAX_BYTES}")
    evidence = Evidence.from_bytes(data)
    if evidence.kind != WRONG_POSSESSION:
        raise PeerViolation(f"evidence is of the kind {evidence.kind!r}, which is not about a server's files")
    return WrongPossession.from_bytes(evidence.body)


def accused(wrong: WrongPossession) -> tuple[str, float]:
    """Return the accused and the claimed time of its signature, unchecked. Raises PeerViolation."""
    try:
        envelope = Envelope.parse(wrong.statement)
    except ValueError as error:
        raise PeerViolation(f"evidence has no statement: {error}") from error
    return envelope.peer_id, envelope.issued_at


def check_possession(wrong: WrongPossession, network_id: str) -> ServerVerdict:
    """Return what the evidence proves, however old it is. Blocks for milliseconds.

    Raises PeerViolation or IntegrityError if it proves nothing: it is malformed, of another network, not signed, or
    correct.
    """
    published = open_manifest(wrong.manifest)
    envelope, signed = read_statement(wrong.statement, network_id, issued_at(wrong.statement))
    if signed.manifest != published.digest or len(signed.paths) != len(signed.drawn):
        raise PeerViolation("the statement is of another manifest, or incomplete", peer_id=envelope.peer_id)
    name = wrong_file(published.manifest, signed.drawn, signed.paths)
    if name is None:
        raise PeerViolation("the statement is correct", peer_id=envelope.peer_id)
    return ServerVerdict(
        peer_id=envelope.peer_id,
        model=published.manifest.name,
        at=envelope.issued_at,
        reason=f"signed a wrong proof that it holds {name} of {published.manifest.name}",
    )
