"""Evidence against servers of a made-up model: statements that a server with other files signs."""

from __future__ import annotations

from support.plain_records import serve_record
from support.published_models import PUBLISHER
from swarm_protocol.envelope import seal
from swarm_protocol.hash_tree import HashTree, leaf_digest
from swarm_protocol.identity import Identity
from swarm_protocol.manifest_messages import (
    CHUNK_BYTES,
    POSSESSION_PURPOSE,
    BlockBytes,
    ByteRange,
    ChunkPath,
    DrawnChunk,
    ModelManifest,
    PossessionStatement,
    PublishedManifest,
    WeightFile,
    sign_manifest,
)
from swarm_protocol.records import ServeRecord
from swarm_protocol.served_evidence_messages import WrongPossession

CHUNKS = [bytes([number]) * CHUNK_BYTES for number in range(3)]
TREE = HashTree.of([leaf_digest(chunk) for chunk in CHUNKS])
MODEL = "tiny"


def manifest(publisher: Identity = PUBLISHER) -> PublishedManifest:
    """Return a model of one block and one file, CHUNKS."""
    num_bytes = len(CHUNKS) * CHUNK_BYTES
    file = WeightFile(name="weights", num_bytes=num_bytes, sha256=bytes(32), root=TREE.root)
    return sign_manifest(
        ModelManifest(
            name=MODEL,
            publisher=publisher.peer_id,
            published_at=1,
            files=(),
            weights=(file,),
            before=(),
            blocks=(BlockBytes(ranges=(ByteRange(file=0, start=0, num_bytes=num_bytes),)),),
            after=(),
        ),
        publisher,
    )


def statement(
    server: Identity, network_id: str, at: float, *, digest: bytes = bytes(32), lifetime_s: float = 60.0
) -> bytes:
    """Return what `server` signs of the second chunk: that its digest is `digest`, with the honest path."""
    said = PossessionStatement(
        manifest=manifest().digest,
        nonce=bytes(32),
        asker=PUBLISHER.peer_id,
        drawn=(DrawnChunk(file=0, index=1),),
        paths=(ChunkPath(digest=digest, siblings=b"".join(TREE.proof(1, 2))),),
    )
    envelope = seal(
        server,
        purpose=POSSESSION_PURPOSE,
        network_id=network_id,
        subject=MODEL,
        payload=said.to_bytes(),
        issued_at=at,
        expires_at=at + lifetime_s,
    )
    return envelope.to_bytes()


def against(server: Identity, network_id: str, at: float) -> bytes:
    """Return encoded Evidence that convicts `server`."""
    return (
        WrongPossession(manifest=manifest().signed, statement=statement(server, network_id, at)).evidence().to_bytes()
    )


def against_nobody(server: Identity, network_id: str, at: float) -> bytes:
    """Return encoded Evidence whose statement is right."""
    right = statement(server, network_id, at, digest=leaf_digest(CHUNKS[1]))
    return WrongPossession(manifest=manifest().signed, statement=right).evidence().to_bytes()


def record() -> ServeRecord:
    """Return what a server of the first block of `manifest` announces."""
    about = manifest()
    return serve_record(
        0, 1, model=MODEL, num_blocks=1, revision=about.revision("float32"), manifest=about.digest, dtype="float32"
    )
