"""The committed state of a replica, its manifest, and the chunks that carry it over the network.

A state consists of theta, momentum, and the small values in its manifest, such as lease stripes and roster. The state's
name is the digest of this manifest, a canonical document that also lists the digests of the state's chunks: equal names
mean equal bits. Chunks are pieces of one byte string: theta, then momentum, both fp32, little-endian, as on every
machine that torch runs on.

The genesis of a run is the state before its first outer step. Its digest may be signed in the run file
(`start.genesis`). Each member computes it from the run's seed or checkpoint.

A manifest's bytes are the length of the head as 4 bytes little-endian, the head as canonical JSON, and the 32-byte
digest of each chunk. Hashing takes about 0.6 ms per chunk: do it off the event loop.

The tensors of a state must not change once others may read them. Shapes: N values of the flat parameter vector.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from swarm_protocol import limits
from swarm_protocol.checks import check_count, check_digest, check_int
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.identity import check_peer_id
from torch import Tensor

from swarm.training.run.layout import MAX_STATE_VALUES
from swarm.training.run.run_config import RunConfig
from swarm.training.standing.held_out_scores import HeldOutScore
from swarm.training.standing.standings import Register
from swarm.training.state.lease import MAX_STRIPES, Cursor, LeaseStripe, first_stripes, trainers_of

CHUNK_BYTES = 1 << 20
"""Small enough that a lying donor costs little, large enough that requests cost less than chunks."""
MAX_HEAD_BYTES = 2 << 20
"""4,096 trainers take 220 KiB in each of two stripes, 240 KiB in the register or on probation, and 300 KiB with scores.
Members that are away take 60 KiB, entries by invitations or vouches 240 KiB, revocations 150 KiB, and the holes of each
stripe 220 KiB."""
MAX_MANIFEST_BYTES = MAX_HEAD_BYTES + 8 * MAX_STATE_VALUES // CHUNK_BYTES * limits.DIGEST_BYTES + 4
_MAX_SAMPLES = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a state. theta and momentum have `num_values` each. `roster` are the sorted members of the group
    that made this state, who decide the next one; it is empty at first. The leases of the next intervals follow from
    `stripes`.

    `probation` has the trainers on probation with the steps that they have left (see `entrance.Probation`), in the
    order of peer ids. `register` has what else is remembered of peers. `held_out` are the trainers' scores, in the same
    order; `drawn` are the peers whose contributions to this outer step are measured now (`held_out_scores`)."""

    outer_step: int
    stripes: tuple[LeaseStripe, ...]
    roster: tuple[str, ...]
    num_values: int
    chunk_digests: tuple[bytes, ...]
    probation: tuple[tuple[str, int], ...] = ()
    register: Register = field(default_factory=Register)
    held_out: tuple[HeldOutScore, ...] = ()
    drawn: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_int(self.outer_step, "outer_step", high=limits.MAX_OUTER_STEP)
        if not 1 <= len(self.stripes) <= MAX_STRIPES:
            raise ValueError(f"a state cannot have {len(self.stripes)} stripes")
        check_int(self.num_values, "num_values", low=1, high=MAX_STATE_VALUES)
        if list(self.roster) != sorted(set(self.roster)):
            raise ValueError("the roster is not sorted and distinct")
        for peer_id in (*self.roster, *(peer_id for stripe in self.stripes for peer_id in stripe.roster)):
            check_peer_id(peer_id)
        trainers = trainers_of(self.stripes)
        on_probation, scored = [peer_id for peer_id, _ in self.probation], [each.peer_id for each in self.held_out]
        for name, peers in (("on probation", on_probation), ("with a score", scored)):
            if peers != sorted(set(peers)) or not trainers.issuperset(peers):
                raise ValueError(f"the peers {name} are not sorted, distinct trainers")
        for _, left in self.probation:
            check_int(left, "probation", low=1, high=limits.MAX_PROBATION_STEPS)
        check_count(self.drawn, "drawn", max_items=limits.MAX_SCORED)
        for peer_id in self.drawn:
            check_peer_id(peer_id)
        if len(self.chunk_digests) != -(-self.num_bytes // CHUNK_BYTES):
            raise ValueError(f"{len(self.chunk_digests)} chunks do not hold {self.num_bytes} bytes")
        for digest in self.chunk_digests:
            check_digest(digest, "chunk_digests")

    @property
    def num_bytes(self) -> int:
        return 8 * self.num_values

    @property
    def num_committed(self) -> int:
        """The number of samples that all outer steps so far have used."""
        return sum(stripe.cursor.num_committed for stripe in self.stripes)

    def chunk_size(self, index: int) -> int:
        return min(CHUNK_BYTES, self.num_bytes - index * CHUNK_BYTES)

    def digest(self) -> bytes:
        """Return the name of the state: 32 bytes, equal on all replicas that hold the same bits."""
        return hashlib.sha256(self.to_bytes()).digest()

    def to_bytes(self) -> bytes:
        """Return the canonical bytes. Equal manifests have equal bytes."""
        head: dict[str, Any] = {
            "outer_step": self.outer_step,
            "lanes": [_stripe_to_json(stripe) for stripe in self.stripes],
            "roster": self.roster,
            "num_values": self.num_values,
        }
        if self.probation:
            head["probation"] = self.probation
        head |= self.register.to_json()
        if self.held_out:
            head["held_out"] = [(each.peer_id, each.value, each.num_measured) for each in self.held_out]
        if self.drawn:
            head["drawn"] = self.drawn
        text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
        return len(text).to_bytes(4, "little") + text + b"".join(self.chunk_digests)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Return the manifest in `data`. Raises PeerViolation for anything that `to_bytes` does not write."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise PeerViolation(f"a state's manifest has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
        try:
            manifest = cls._parse(data)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise PeerViolation(f"a state's manifest is malformed: {error}") from error
        if manifest.to_bytes() != data:
            raise PeerViolation("a state's manifest is not in its canonical form")
        return manifest

    @classmethod
    def _parse(cls, data: bytes) -> Manifest:
        head_end = 4 + int.from_bytes(data[:4], "little")
        if not 4 < head_end <= min(len(data), 4 + MAX_HEAD_BYTES):
            raise ValueError("its head is truncated or too large")
        head: dict[str, Any] = json.loads(data[4:head_end])
        return cls(
            outer_step=head["outer_step"],
            stripes=tuple(_stripe_from_json(stripe) for stripe in head["lanes"]),
            roster=tuple(head["roster"]),
            num_values=head["num_values"],
            probation=tuple((peer_id, left) for peer_id, left in head.get("probation", ())),
            register=Register.from_json(head),
            held_out=tuple(
                HeldOutScore(peer_id=peer_id, value=value, num_measured=count)
                for peer_id, value, count in head.get("held_out", ())
            ),
            drawn=tuple(head.get("drawn", ())),
            chunk_digests=tuple(
                data[start : start + limits.DIGEST_BYTES] for start in range(head_end, len(data), limits.DIGEST_BYTES)
            ),
        )


def _stripe_to_json(stripe: LeaseStripe) -> dict[str, Any]:
    holes = [[hole.start, hole.stop] for hole in stripe.cursor.holes]
    return {"next_sample": stripe.cursor.next_sample, "holes": holes, "roster": stripe.roster}


def _stripe_from_json(stripe: dict[str, Any]) -> LeaseStripe:
    """Raises what `json` and the checks raise."""
    holes = [(check_int(start, "hole", high=_MAX_SAMPLES), stop) for start, stop in stripe["holes"]]
    cursor = Cursor(
        next_sample=check_int(stripe["next_sample"], "next_sample", high=_MAX_SAMPLES),
        holes=tuple(range(start, check_int(stop, "hole", high=_MAX_SAMPLES)) for start, stop in holes),
    )
    return LeaseStripe(cursor=cursor, roster=tuple(stripe["roster"]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaState:
    """A committed state. `theta_N` and `momentum_N` are flat fp32 CPU tensors of one size; `manifest` has their digests
    and everything else."""

    manifest: Manifest
    theta_N: Tensor
    momentum_N: Tensor

    def __post_init__(self) -> None:
        for x_N in (self.theta_N, self.momentum_N):
            fits = x_N.dtype == torch.float32 and x_N.device.type == "cpu" and x_N.is_contiguous()
            if not fits or x_N.shape != (self.manifest.num_values,):
                raise ValueError("a state is made of two flat fp32 CPU tensors of one size")

    @classmethod
    def initial(cls, theta_N: Tensor, overlap_steps: int = 0) -> ReplicaState:
        """Return the state before the first outer step of a run with `overlap_steps`. Blocks."""
        momentum_N = torch.zeros_like(theta_N)
        manifest = Manifest(
            outer_step=0,
            stripes=first_stripes(overlap_steps),
            roster=(),
            num_values=theta_N.numel(),
            chunk_digests=_chunk_digests(theta_N, momentum_N),
        )
        return cls(manifest=manifest, theta_N=theta_N, momentum_N=momentum_N)

    @property
    def outer_step(self) -> int:
        return self.manifest.outer_step

    @property
    def digest(self) -> bytes:
        return self.manifest.digest()

    def hashed_again(self) -> ReplicaState:
        """Return this state with the manifest of its present contents, which may have been damaged in memory.
        Blocks."""
        return replace(
            self, manifest=replace(self.manifest, chunk_digests=_chunk_digests(self.theta_N, self.momentum_N))
        )

    def chunk(self, index: int) -> bytes:
        """Return a copy of chunk `index`. Raises IndexError if there is none."""
        theta, momentum = _bytes_of(self.theta_N), _bytes_of(self.momentum_N)
        start, stop = index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES
        if not 0 <= start < len(theta) + len(momentum):
            raise IndexError(f"the state has no chunk {index}")
        split = len(theta)
        return bytes(theta[start:stop]) + bytes(momentum[max(0, start - split) : max(0, stop - split)])


MAX_DRAWN_VALUES = 256_000_000
"""The largest model whose initial weights are computed only to pin them: 3 GB of memory, and half a minute of one
core."""


def genesis_digest(theta_N: Tensor, config: RunConfig) -> str:
    """Return the digest of the initial state of a run of `config` with the weights `theta_N`. Blocks."""
    return ReplicaState.initial(theta_N, config.overlap_steps).digest.hex()


def check_genesis(manifest: Manifest, config: RunConfig) -> None:
    """Raises IntegrityError if this is a state before the first outer step with other weights than the run pins,
    whoever was admitted. A run that does not pin its genesis allows any weights."""
    if manifest.outer_step or not config.start.genesis:
        return
    first = replace(
        manifest,
        roster=(),
        stripes=first_stripes(config.overlap_steps),
        probation=(),
        register=Register(),
        held_out=(),
        drawn=(),
    )
    if (digest := first.digest().hex()) != config.start.genesis:
        raise IntegrityError(
            f"this state has other initial weights than the run's author signed: {digest[:12]} instead of "
            f"{config.start.genesis[:12]}",
            remedy="get the state from other members; if this machine made it, report its processor and torch version",
        )


class StateHasher:
    """Hashes the chunks of a state that is given piece by piece: each piece of theta with the same piece of
    momentum."""

    def __init__(self, num_values: int) -> None:
        # the chunk in which theta ends also has momentum's first bytes, which are given before theta's last ones
        num_shared = -4 * num_values % CHUNK_BYTES
        self._shared = bytearray()
        self._num_shared = min(num_shared, 4 * num_values)
        self._theta, self._momentum = _ChunkHasher(), _ChunkHasher()

    def add(self, theta_C: Tensor, momentum_C: Tensor) -> None:
        """Add the next values of both, which may be empty."""
        if not theta_C.numel():
            return
        self._theta.add(_bytes_of(theta_C))
        momentum = _bytes_of(momentum_C)
        num_missing = self._num_shared - len(self._shared)
        self._shared += momentum[:num_missing]
        self._momentum.add(momentum[num_missing:])

    def chunk_digests(self) -> tuple[bytes, ...]:
        """Return the digests of the state's chunks. Call it once, after all values were added."""
        self._theta.add(memoryview(self._shared))
        return (*self._theta.finish(), *self._momentum.finish())


class _ChunkHasher:
    """Hashes a sequence of chunks, the last of which may be shorter."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._chunk, self._size = hashlib.sha256(), 0

    def add(self, data: memoryview) -> None:
        while len(data):
            piece = data[: CHUNK_BYTES - self._size]
            self._chunk.update(piece)
            self._size, data = self._size + len(piece), data[len(piece) :]
            if self._size == CHUNK_BYTES:
                self._end_chunk()

    def finish(self) -> list[bytes]:
        if self._size:
            self._end_chunk()
        return self._digests

    def _end_chunk(self) -> None:
        self._digests.append(self._chunk.digest())
        self._chunk, self._size = hashlib.sha256(), 0


class Assembly:
    """Assembles a state from chunks that arrive in any order. Allocates the memory of the whole state once."""

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
        """Copy the missing chunks that `state` has. The chunks that differ are then still missing."""
        if state.manifest.num_values == self.manifest.num_values:
            for index in self.missing:
                with suppress(IntegrityError):
                    self.put(index, state.chunk(index))

    def finish(self) -> ReplicaState:
        """Return the state, of which no chunk may be missing. Raises IntegrityError if a value is not finite. Do not
        use the assembly afterwards."""
        assert not self._missing
        if not all(bool(torch.isfinite(x_N).all()) for x_N in (self._theta_N, self._momentum_N)):
            raise IntegrityError("the state holds values that are not finite")
        return ReplicaState(manifest=self.manifest, theta_N=self._theta_N, momentum_N=self._momentum_N)


def _chunk_digests(theta_N: Tensor, momentum_N: Tensor) -> tuple[bytes, ...]:
    hasher = StateHasher(theta_N.numel())
    hasher.add(theta_N, momentum_N)
    return hasher.chunk_digests()


def _bytes_of(x_N: Tensor) -> memoryview:
    return x_N.numpy().data.cast("B")
