"""The committed state of a replica, its name, and the chunks it travels in.

The state's name is the digest of its manifest, which lists the digests of its chunks: equal digests mean equal bits.
Chunks cut one canonical byte string (theta, then momentum, both little-endian fp32), so its layout has nothing to do
with how chunks are fetched. Hashing blocks for about a millisecond a MiB: call it off the event loop.

The tensors have one owner, which alone may change them in place; whoever serves chunks meanwhile serves a `copy`.
Shapes: N values of the flat parameter vector.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.training.lease import Cursor
from swarm_protocol.errors import IntegrityError, PeerViolation

CHUNK_BYTES = 1 << 20
DIGEST_BYTES = 32
MAX_STATE_VALUES = 1 << 34
"""Parameters of a run: 128 GiB of state, more than any volunteer holds."""
MAX_MANIFEST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a state consists of. `digest()` is the state's name.

    `group` are the members whose round committed the state, who hold the leases that follow from it.
    """

    outer_step: int
    cursor: Cursor
    group: tuple[str, ...]
    num_values: int
    chunk_digests: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.outer_step < 1 << 40:
            raise ValueError("impossible outer step")
        if not 0 < self.num_values <= MAX_STATE_VALUES:
            raise ValueError("impossible number of values")
        if len(self.chunk_digests) != -(-self.num_bytes // CHUNK_BYTES):
            raise ValueError("the number of chunks does not fit the number of values")
        if any(len(digest) != DIGEST_BYTES for digest in self.chunk_digests):
            raise ValueError("a chunk's digest has a wrong size")
        if list(self.group) != sorted(set(self.group)):
            raise ValueError("the group is not sorted")

    @property
    def num_bytes(self) -> int:
        return 8 * self.num_values

    def chunk_size(self, index: int) -> int:
        return min(CHUNK_BYTES, self.num_bytes - index * CHUNK_BYTES)

    def digest(self) -> str:
        """64 hexadecimal digits: the name of the state, equal on all replicas that hold the same bits."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Canonical: equal manifests have equal bytes."""
        head = {
            "outer_step": self.outer_step,
            "next_sample": self.cursor.next_sample,
            "holes": [[hole.start, hole.stop] for hole in self.cursor.holes],
            "group": list(self.group),
            "num_values": self.num_values,
        }
        text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
        return struct.pack("<I", len(text)) + text + b"".join(self.chunk_digests)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises PeerViolation for anything that `to_bytes` does not write."""
        try:
            if len(data) > MAX_MANIFEST_BYTES:
                raise ValueError("it is too large")
            (size,) = struct.unpack_from("<I", data)
            head = json.loads(data[4 : 4 + size])
            digests = data[4 + size :]
            manifest = cls(
                outer_step=int(head["outer_step"]),
                cursor=Cursor(
                    next_sample=int(head["next_sample"]),
                    holes=tuple(range(int(start), int(stop)) for start, stop in head["holes"]),
                ),
                group=tuple(str(member) for member in head["group"]),
                num_values=int(head["num_values"]),
                chunk_digests=tuple(
                    digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)
                ),
            )
        except (ValueError, TypeError, KeyError, struct.error, RecursionError, OverflowError) as error:
            raise PeerViolation(f"malformed state manifest: {error}") from None
        if manifest.to_bytes() != data:
            raise PeerViolation("the state manifest is not in its canonical form")
        return manifest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaState:
    """`theta_N` and `momentum_N`: flat fp32 CPU tensors of one size. `group`: see Manifest; empty at step 0."""

    outer_step: int
    cursor: Cursor
    group: tuple[str, ...]
    theta_N: Tensor
    momentum_N: Tensor

    def __post_init__(self) -> None:
        for x_N in (self.theta_N, self.momentum_N):
            if x_N.dtype != torch.float32 or x_N.device.type != "cpu" or x_N.shape != (self.theta_N.numel(),):
                raise ValueError("a state is made of two flat fp32 CPU tensors of one size")

    @classmethod
    def initial(cls, theta_N: Tensor) -> ReplicaState:
        """Before the first outer step."""
        return cls(
            outer_step=0, cursor=Cursor(), group=(), theta_N=theta_N, momentum_N=torch.zeros_like(theta_N)
        )

    def copy(self) -> ReplicaState:
        return ReplicaState(
            outer_step=self.outer_step,
            cursor=self.cursor,
            group=self.group,
            theta_N=self.theta_N.clone(),
            momentum_N=self.momentum_N.clone(),
        )

    def manifest(self) -> Manifest:
        """Hashes everything. Equal states give equal manifests."""
        num_chunks = -(-8 * self.theta_N.numel() // CHUNK_BYTES)
        return Manifest(
            outer_step=self.outer_step,
            cursor=self.cursor,
            group=self.group,
            num_values=self.theta_N.numel(),
            chunk_digests=tuple(hashlib.sha256(self.chunk(index)).digest() for index in range(num_chunks)),
        )

    def chunk(self, index: int) -> bytes:
        """A copy of chunk `index`. Raises IndexError if there is none."""
        start = index * CHUNK_BYTES
        if not 0 <= start < 8 * self.theta_N.numel():
            raise IndexError(f"no chunk {index}")
        stop = start + CHUNK_BYTES
        views = (memoryview(x_N.numpy()).cast("B") for x_N in (self.theta_N, self.momentum_N))
        theta, momentum = views
        split = len(theta)
        return bytes(theta[start:stop]) + bytes(momentum[max(0, start - split) : max(0, stop - split)])


class Assembly:
    """A state that arrives chunk by chunk, in any order. Memory is allocated once, as the manifest's total."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._theta_N = torch.empty(manifest.num_values)
        self._momentum_N = torch.empty(manifest.num_values)
        self._missing = set(range(len(manifest.chunk_digests)))

    @property
    def missing(self) -> frozenset[int]:
        return frozenset(self._missing)

    def put(self, index: int, data: bytes) -> None:
        """Take chunk `index`. Raises IntegrityError, and changes nothing, if its size or digest is wrong."""
        if not 0 <= index < len(self.manifest.chunk_digests):
            raise IntegrityError(f"the state has no chunk {index}")
        if len(data) != self.manifest.chunk_size(index):
            raise IntegrityError(f"chunk {index} has {len(data)} bytes instead of {self.manifest.chunk_size(index)}")
        if hashlib.sha256(data).digest() != self.manifest.chunk_digests[index]:
            raise IntegrityError(f"chunk {index} does not match its digest")
        start = index * CHUNK_BYTES
        split = 4 * self.manifest.num_values
        in_theta = max(0, min(len(data), split - start))
        theta, momentum = (memoryview(x_N.numpy()).cast("B") for x_N in (self._theta_N, self._momentum_N))
        if in_theta:
            theta[start : start + in_theta] = data[:in_theta]
        if in_theta < len(data):
            offset = start + in_theta - split
            momentum[offset : offset + len(data) - in_theta] = data[in_theta:]
        self._missing.discard(index)

    def finish(self) -> ReplicaState:
        """Raises IntegrityError if chunks are missing, or if a value is not finite."""
        if self._missing:
            raise IntegrityError(f"{len(self._missing)} chunks of the state are missing")
        for x_N in (self._theta_N, self._momentum_N):
            if not bool(torch.isfinite(x_N).all()):
                raise IntegrityError("the state holds values that are not finite")
        return ReplicaState(
            outer_step=self.manifest.outer_step,
            cursor=self.manifest.cursor,
            group=self.manifest.group,
            theta_N=self._theta_N,
            momentum_N=self._momentum_N,
        )


def from_chunks(manifest: Manifest, chunks: Iterable[bytes]) -> ReplicaState:
    """The state of which `chunks` are all chunks, in order. Raises IntegrityError as `Assembly` does."""
    assembly = Assembly(manifest)
    for index, data in enumerate(chunks):
        assembly.put(index, data)
    return assembly.finish()


def differing_chunks(mine: Manifest, theirs: Manifest) -> list[int]:
    """The chunks to fetch in order to turn the state `mine` into `theirs`."""
    if mine.num_values != theirs.num_values:
        return list(range(len(theirs.chunk_digests)))
    pairs = enumerate(zip(mine.chunk_digests, theirs.chunk_digests, strict=True))
    return [index for index, (own, other) in pairs if own != other]
