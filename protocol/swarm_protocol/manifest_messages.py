"""Defines a model's manifest, which its publisher signs, and the messages by which servers prove that they hold its
files.

The manifest names every file of a model by its sha256. A weight file is also named by the root of the hash tree
(`swarm_protocol.hash_tree`) over its chunks of CHUNK_BYTES, the last of which may be shorter. So a server can prove any
single chunk to a peer that has only the manifest. The manifest also maps each block to byte ranges of the files, so
that a server is asked only about its own blocks.

A manifest is named by the sha256 of its bytes. Its signature is over `b"swarm-manifest:"` and these bytes; it belongs
to no network and does not expire. `swarm.serving.manifest` makes, checks and uses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated

from swarm_protocol import limits, wire
from swarm_protocol.checks import Checked, Digest, Name, check_name, one_line, sized, up_to, whole
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.identity import SIGNATURE_BYTES, Identity, PeerId, verify
from swarm_protocol.proto import manifest_pb2
from swarm_protocol.records import SERVED_DTYPES

CHUNK_BYTES = 64 * 2**10
"""A chunk crosses a slow uplink (1 Mbit/s) in half a second; the tree over a file of 5 GiB has 2.6 MiB of leaves."""

MANIFEST_METHOD = "serving.manifest"
"""A call: ModelManifestRequest / SignedManifest. The model's name follows after a slash."""

POSSESSION_METHOD = "serving.possession"
"""A call: PossessionRequest / PossessionResponse. The model's name follows after a slash."""

POSSESSION_PURPOSE = "possession"

_DOMAIN = b"swarm-manifest:"


def check_file_name(value: object, field: str) -> None:
    """Check the name of a file directly in a model's directory: a single segment that does not begin with a dot."""
    if "/" in check_name(value, field):
        raise ValueError(f"{field} {value!r} is not the name of a file in the model's directory")


FileName = Annotated[str, check_file_name]
NumFileBytes = Annotated[int, whole(limits.MAX_WEIGHT_FILE_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile(Checked):
    """A file beside the weights, such as a config or a tokenizer."""

    name: FileName
    num_bytes: NumFileBytes
    sha256: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile(Checked):
    """A file of weights. `root` is that of the hash tree over its chunks."""

    name: FileName
    num_bytes: Annotated[int, whole(limits.MAX_WEIGHT_FILE_BYTES, low=1)]
    sha256: Digest
    root: Digest

    @property
    def num_chunks(self) -> int:
        return -(-self.num_bytes // CHUNK_BYTES)

    def chunk_bytes(self, index: int) -> int:
        """Return the size of one chunk."""
        return min(CHUNK_BYTES, self.num_bytes - index * CHUNK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange(Checked):
    """Bytes `[start, start + num_bytes)` of the weight file with that index in the manifest."""

    file: Annotated[int, whole(limits.MAX_WEIGHT_FILES - 1)]
    start: NumFileBytes
    num_bytes: Annotated[int, whole(limits.MAX_WEIGHT_FILE_BYTES, low=1)]


Ranges = Annotated[tuple[ByteRange, ...], up_to(limits.MAX_MANIFEST_RANGES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes(Checked):
    """The places of the tensors of one block."""

    ranges: Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelManifest(wire.WireMessage):
    """The files of the model that `publisher` calls `name`.

    `before` are the tensors that a server of the first block needs beside that block's, `after` those that a server of
    the last block needs; a tied embedding is in both. `published_at` is in Unix seconds. `origin` is the publisher's
    text about the model's origin: a commit on a hub, or a run and its outer step.
    """

    PROTO = manifest_pb2.ModelManifest
    MAX_BYTES = limits.MAX_MANIFEST_BYTES

    name: Name
    publisher: PeerId
    published_at: Annotated[int, whole(int(limits.MAX_TIME_S), low=1)]
    files: Annotated[tuple[ManifestFile, ...], up_to(limits.MAX_MANIFEST_FILES)]
    weights: Annotated[tuple[WeightFile, ...], up_to(limits.MAX_WEIGHT_FILES)]
    before: Ranges
    blocks: Annotated[tuple[BlockBytes, ...], up_to(limits.MAX_BLOCKS)]
    after: Ranges
    origin: Annotated[str, one_line(limits.MAX_SOURCE_BYTES)] = ""

    def __post_init__(self) -> None:
        if len(set(self.file_names)) < len(self.file_names):
            raise ValueError("the manifest names a file twice")
        if not self.weights or not self.blocks:
            raise ValueError("the manifest has no weights or no blocks")
        if not all(block.ranges for block in self.blocks):
            raise ValueError("the manifest has a block without bytes")
        ranges = [*self.before, *(each for block in self.blocks for each in block.ranges), *self.after]
        if len(ranges) > limits.MAX_MANIFEST_RANGES:
            raise ValueError(f"the manifest has {len(ranges)} ranges, more than {limits.MAX_MANIFEST_RANGES}")
        for each in ranges:
            if each.file >= len(self.weights) or each.start + each.num_bytes > self.weights[each.file].num_bytes:
                raise ValueError("the manifest has a range that is in none of its files")

    @property
    def file_names(self) -> list[str]:
        """The names of all files, weights last."""
        return [*(each.name for each in self.files), *(each.name for each in self.weights)]

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def ranges_of(self, start: int, end: int) -> Iterator[ByteRange]:
        """Yield the ranges that a server of blocks `[start, end)` needs."""
        if start == 0:
            yield from self.before
        for block in self.blocks[start:end]:
            yield from block.ranges
        if end == self.num_blocks:
            yield from self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedManifest(wire.WireMessage):
    """The bytes of a ModelManifest with its publisher's signature. Only `open_manifest` checks the signature."""

    PROTO = manifest_pb2.SignedManifest
    MAX_BYTES = limits.MAX_MANIFEST_BYTES + limits.MAX_OPEN_BYTES

    manifest: bytes
    signature: Annotated[bytes, sized(SIGNATURE_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedManifest:
    """A manifest whose signature was checked, with its digest and the signed bytes that are passed on."""

    manifest: ModelManifest
    digest: bytes
    signed: bytes = field(repr=False)

    @property
    def publisher(self) -> str:
        return self.manifest.publisher

    def revision(self, dtype: str) -> str:
        return manifest_revision(self.digest, dtype)


def sign_manifest(manifest: ModelManifest, identity: Identity) -> PublishedManifest:
    """Sign `manifest`, whose publisher is `identity`. Raises ValueError for one that is too large to be read."""
    assert manifest.publisher == identity.peer_id
    content = manifest.to_bytes()
    if len(content) > limits.MAX_MANIFEST_BYTES:
        raise ValueError(f"the manifest has {len(content)} bytes, more than {limits.MAX_MANIFEST_BYTES}")
    signed = SignedManifest(manifest=content, signature=identity.sign(_DOMAIN + content)).to_bytes()
    return open_manifest(signed)


def open_manifest(data: bytes) -> PublishedManifest:
    """Return the manifest in `data`, which is signed by its publisher.

    Raises PeerViolation if it is malformed, IntegrityError if the signature is wrong.
    """
    signed = SignedManifest.from_bytes(data)
    manifest = ModelManifest.from_bytes(signed.manifest)
    verify(manifest.publisher, _DOMAIN + signed.manifest, signed.signature)
    return PublishedManifest(manifest=manifest, digest=hashlib.sha256(signed.manifest).digest(), signed=data)


def manifest_revision(digest: bytes, dtype: str) -> str:
    """Return the revision that servers announce if their weights follow from the manifest with that `digest`, in
    `dtype`."""
    return hashlib.blake2b(b"manifest\0" + digest + dtype.encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=8192)
def manifest_dtype(digest: bytes, revision: str) -> str:
    """Return the dtype with which `revision` follows from the manifest with that `digest`, or "" if it does not follow
    from it."""
    return next((dtype for dtype in SERVED_DTYPES if manifest_revision(digest, dtype) == revision), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelManifestRequest(wire.WireMessage):
    """Asks for the signed manifest with this digest."""

    PROTO = manifest_pb2.ModelManifestRequest
    MAX_BYTES = limits.MAX_OPEN_BYTES

    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnChunk(Checked):
    """The chunk with that index of the weight file with that index in the manifest."""

    file: Annotated[int, whole(limits.MAX_WEIGHT_FILES - 1)]
    index: Annotated[int, whole(limits.MAX_WEIGHT_FILE_BYTES // CHUNK_BYTES)]


Drawn = Annotated[tuple[DrawnChunk, ...], up_to(limits.MAX_DRAWN_CHUNKS)]
Nonce = Annotated[bytes, sized(limits.DIGEST_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PossessionRequest(wire.WireMessage):
    """Asks a server to show the `drawn` chunks. The nonce is random, so that no older answer is valid."""

    PROTO = manifest_pb2.PossessionRequest
    MAX_BYTES = limits.MAX_OPEN_BYTES

    manifest: Digest
    nonce: Nonce
    drawn: Drawn

    def __post_init__(self) -> None:
        if not self.drawn:
            raise ValueError("no chunk is drawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPath(Checked):
    """The digest of a chunk, and the digests that lead from it to the root of its file, from the bottom up."""

    digest: Digest
    siblings: bytes

    def __post_init__(self) -> None:
        num_digests, rest = divmod(len(self.siblings), limits.DIGEST_BYTES)
        if rest or num_digests > limits.MAX_CHUNK_PATH:
            raise ValueError(f"a path has {len(self.siblings)} bytes")

    @property
    def proof(self) -> list[bytes]:
        """The digests beside the path, as a list."""
        size = limits.DIGEST_BYTES
        return [self.siblings[at : at + size] for at in range(0, len(self.siblings), size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PossessionStatement(wire.WireMessage):
    """The signed part of an answer: the peer and the request that it answers, and the path of each drawn chunk.

    If a signed path does not lead to the manifest's root, it proves to anybody that the signer announced files that it
    did not have.
    """

    PROTO = manifest_pb2.PossessionStatement
    MAX_BYTES = limits.MAX_POSSESSION_STATEMENT_BYTES

    manifest: Digest
    nonce: Nonce
    asker: PeerId
    drawn: Drawn
    paths: Annotated[tuple[ChunkPath, ...], up_to(limits.MAX_DRAWN_CHUNKS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PossessionResponse(wire.WireMessage):
    """`statement` is an envelope around a PossessionStatement; `chunks` are the bytes of the drawn chunks."""

    PROTO = manifest_pb2.PossessionResponse
    MAX_BYTES = limits.MAX_POSSESSION_BYTES

    statement: bytes
    chunks: Annotated[tuple[bytes, ...], up_to(limits.MAX_DRAWN_CHUNKS)]

    def __post_init__(self) -> None:
        if any(len(chunk) > CHUNK_BYTES for chunk in self.chunks):
            raise ValueError(f"a chunk has more than {CHUNK_BYTES} bytes")


def readable_manifest(data: bytes, where: str) -> PublishedManifest:
    """Open the signed manifest that `where` holds, for a person. Raises IntegrityError."""
    try:
        return open_manifest(data)
    except PeerViolation as error:
        raise IntegrityError(
            f"{where} is not a signed manifest of a model",
            remedy="name a file that swarm-node models publish has written, such as swarm-model.manifest",
        ) from error
    except IntegrityError as error:
        raise IntegrityError(
            f"the manifest {where} is damaged: its publisher's signature is not valid",
            remedy="get the file from the publisher again",
        ) from error
