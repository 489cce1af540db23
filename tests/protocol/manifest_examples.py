"""Examples of each message about a model's signed manifest, and of the proofs that a server holds its files."""

from __future__ import annotations

from swarm_protocol.identity import Identity
from swarm_protocol.manifest_messages import (
    BlockBytes,
    ByteRange,
    ChunkPath,
    DrawnChunk,
    ManifestFile,
    ModelManifest,
    ModelManifestRequest,
    PossessionRequest,
    PossessionResponse,
    PossessionStatement,
    SignedManifest,
    WeightFile,
    sign_manifest,
)

PUBLISHER = Identity(bytes(range(32)))
DIGEST = bytes(range(32))

MANIFEST = ModelManifest(
    name="story",
    publisher=PUBLISHER.peer_id,
    published_at=1_700_000_000,
    files=(ManifestFile(name="config.json", num_bytes=2, sha256=DIGEST),),
    weights=(
        WeightFile(name="model-1.safetensors", num_bytes=1000, sha256=DIGEST, root=DIGEST),
        WeightFile(name="model-2.safetensors", num_bytes=200_000, sha256=DIGEST, root=DIGEST[::-1]),
    ),
    before=(ByteRange(file=0, start=8, num_bytes=100),),
    blocks=(
        BlockBytes(ranges=(ByteRange(file=0, start=108, num_bytes=892), ByteRange(file=1, start=8, num_bytes=10))),
        BlockBytes(ranges=(ByteRange(file=1, start=18, num_bytes=199_900),)),
    ),
    after=(),
    origin="owner/story@0123456789abcdef",
)
SIGNED = sign_manifest(MANIFEST, PUBLISHER).signed
DRAWN = (DrawnChunk(file=1, index=3), DrawnChunk(file=0, index=0))

EXAMPLES: tuple[object, ...] = (
    MANIFEST,
    SignedManifest.from_bytes(SIGNED),
    ModelManifestRequest(digest=DIGEST),
    PossessionRequest(manifest=DIGEST, nonce=DIGEST, drawn=DRAWN),
    PossessionStatement(
        manifest=DIGEST,
        nonce=DIGEST,
        asker=PUBLISHER.peer_id,
        drawn=DRAWN,
        paths=(ChunkPath(digest=DIGEST, siblings=DIGEST * 2), ChunkPath(digest=DIGEST, siblings=b"")),
    ),
    PossessionResponse(statement=b"an envelope", chunks=(b"some bytes", b"")),
)
