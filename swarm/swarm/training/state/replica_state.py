"""The committed state of a replica, its name, and the chunks it travels in.

The state's name is the digest of its manifest, which lists the digests of its chunks: equal digests mean equal bits.
Chunks cut one canonical byte string (theta, then momentum, both fp32, little-endian as on every machine that torch
runs on), so its layout has nothing to do with how they are fetched. Hashing takes about 0.6 ms a chunk: do it off the
event loop.

The tensors belong to one task, which alone may change them, and only while nobody reads chunks: others get a `copy`.
Shapes: N values of the flat parameter vector.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from swarm_protocol.errors import IntegrityError
from torch import Tensor

from swarm.training.inner.lease_stripe import Lane, first_lanes
from swarm.training.state.manifest import CHUNK_BYTES, Manifest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaState:
    """`theta_N` and `momentum_N`: flat fp32 CPU tensors of one size. `roster`: the sorted members of the group that
    made this state, who decide what follows; empty at first. `lanes`: the leases of what follows."""

    outer_step: int
    lanes: tuple[Lane, ...]
    roster: tuple[str, ...]
    theta_N: Tensor
    momentum_N: Tensor

    def __post_init__(self) -> None:
        for x_N in (self.theta_N, self.momentum_N):
            fits = x_N.dtype == torch.float32 and x_N.device.type == "cpu" and x_N.is_contiguous()
            if not fits or x_N.shape != (self.theta_N.numel(),):
                raise ValueError("a state is made of two flat fp32 CPU tensors of one size")

    @classmethod
    def initial(cls, theta_N: Tensor, overlap_steps: int = 0) -> ReplicaState:
        """Before the first outer step of a run whose rounds overlap with so many inner steps."""
        lanes, momentum_N = first_lanes(overlap_steps), torch.zeros_like(theta_N)
        return cls(outer_step=0, lanes=lanes, roster=(), theta_N=theta_N, momentum_N=momentum_N)

    @property
    def num_committed(self) -> int:
        """How many samples all outer steps so far have used."""
        return sum(lane.cursor.num_committed for lane in self.lanes)

    def copy(self) -> ReplicaState:
        return replace(self, theta_N=self.theta_N.clone(), momentum_N=self.momentum_N.clone())

    def manifest(self) -> Manifest:
        """Hashes everything. Equal states give equal manifests."""
        num_chunks = -(-8 * self.theta_N.numel() // CHUNK_BYTES)
        return Manifest(
            outer_step=self.outer_step,
            lanes=self.lanes,
            roster=self.roster,
            num_values=self.theta_N.numel(),
            chunk_digests=tuple(hashlib.sha256(self.chunk(index)).digest() for index in range(num_chunks)),
        )

    def chunk(self, index: int) -> bytes:
        """A copy of chunk `index`. Raises IndexError if there is none."""
        theta, momentum = _bytes_of(self.theta_N), _bytes_of(self.momentum_N)
        start, stop = index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES
        if not 0 <= start < len(theta) + len(momentum):
            raise IndexError(f"the state has no chunk {index}")
        split = len(theta)
        return bytes(theta[start:stop]) + bytes(momentum[max(0, start - split) : max(0, stop - split)])


class Assembly:
    """A state that arrives chunk by chunk, in any order. Memory is taken once: what the manifest's values need."""

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
        start, split = index * CHUNK_BYTES, 4 * self.manifest.num_values
        num_theta = min(len(data), max(0, split - start))
        if num_theta:
            _bytes_of(self._theta_N)[start : start + num_theta] = data[:num_theta]
        if num_theta < len(data):
            offset = start + num_theta - split
            _bytes_of(self._momentum_N)[offset : offset + len(data) - num_theta] = data[num_theta:]
        self._missing.discard(index)

    def reuse(self, state: ReplicaState) -> None:
        """Take from `state` the missing chunks that are equal there: what is still missing then is what differs."""
        own = state.manifest()
        if own.num_values == self.manifest.num_values:
            for index in sorted(self._missing):
                if own.chunk_digests[index] == self.manifest.chunk_digests[index]:
                    self.put(index, state.chunk(index))

    def finish(self) -> ReplicaState:
        """Raises IntegrityError if chunks are missing, or a value is not finite. The assembly is not used any more."""
        if self._missing:
            raise IntegrityError(f"{len(self._missing)} chunks of the state are missing")
        if not all(bool(torch.isfinite(x_N).all()) for x_N in (self._theta_N, self._momentum_N)):
            raise IntegrityError("the state holds values that are not finite")
        return ReplicaState(
            outer_step=self.manifest.outer_step,
            lanes=self.manifest.lanes,
            roster=self.manifest.roster,
            theta_N=self._theta_N,
            momentum_N=self._momentum_N,
        )


def _bytes_of(x_N: Tensor) -> memoryview:
    return x_N.numpy().data.cast("B")
