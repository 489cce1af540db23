"""Proofs that a server holds the files it announces: which chunks are drawn, and what an answer shows. Pure.

This is provable data possession (Ateniese et al. 2007) in its simplest form, by Merkle trees: the one that asks needs
the manifest alone. A server that lacks a share p of the bytes of its blocks passes k draws with probability (1 - p)^k.
What a proof shows is that the server could get the publisher's bytes within the deadline; not that it computes with
them, nor that it made its quantized weights of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, OutOfTime, unseal
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.hash_tree import leaf_digest, root_above
from swarm_protocol.manifest_messages import (
    CHUNK_BYTES,
    POSSESSION_PURPOSE,
    ChunkPath,
    DrawnChunk,
    ModelManifest,
    PossessionRequest,
    PossessionResponse,
    PossessionStatement,
)

NUM_DRAWN = 4
"""Chunks of one proof: 256 KiB."""

STATEMENT_LIFETIME_S = 30 * 86400.0
"""Time for which a signed answer is valid."""

MAX_AGE_S = limits.MAX_RECORD_LIFETIME_S
"""Maximum age of an answer: one that is dated back would convict its signer for a shorter time. A server whose clock is
so far behind is in no listing either."""


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

    Raises PeerViolation for an answer that is malformed or to another request, OutOfTime for one of another time than
    `now`, and IntegrityError for one whose chunks are not those of the manifest.
    """
    response = PossessionResponse.from_bytes(answer)
    envelope, statement = read_statement(response.statement, network_id, now)
    if envelope.issued_at < now - MAX_AGE_S:
        raise OutOfTime("the answer was signed long ago, or a clock is wrong", peer_id=peer_id)
    asked = (request.manifest, request.nonce, asker, request.drawn)
    if envelope.peer_id != peer_id:
        raise PeerViolation("the answer is signed by another", peer_id=peer_id)
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
    """Return the signed statement in `data`, with its envelope. Raises PeerViolation, IntegrityError for what nobody
    has signed for this network, or not for `now`."""
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
    """Return the name of the first file to whose root a path does not lead."""
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
