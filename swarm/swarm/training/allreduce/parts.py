"""Cuts a round's vector into parts, encodes and checks frames, and holds one part's result as it grows.

The vector is cut into leaves. Leaves make up the parts, one for each owner, and the frames that are sent. Each leaf is
committed to, aggregated and audited on its own. Where leaves begin depends on the vector's size alone, since members
commit to theirs before there is a group. A part's result is its frames' encoded bytes, one after the other. All members
must hold the same bytes; no member keeps them decoded.

This module does not use the network. Shapes: N values of the vector, F values of a frame.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from swarm_compression import Codec, CodecError
from swarm_compression.codec import CUT_VALUES, Data
from swarm_compression.feedback import ErrorFeedback
from swarm_protocol import limits
from swarm_protocol.errors import IntegrityError, PeerViolation, RoundError, SwarmError
from swarm_protocol.proof_messages import Evidence
from swarm_protocol.training_messages import Contribution, Group
from torch import Tensor

from swarm.training.standing.entrance import Probation
from swarm.trust.aggregator import Aggregator

MAX_SKEW = 4.0
"""Maximum ratio of the largest part to the median one, and of the median one to the smallest. A member that overstates
its bandwidth does not get the whole vector, and a member that understates it still gets a share."""

NOISE = 1.5
"""Bandwidths count as equal to the median within this ratio: parts that follow measurement noise only make the largest
part larger."""

FRAME_VALUES = 3 << 15
"""Maximum values in one message: 384 KiB of fp32, a quarter of that in int8. Smaller frames cost time, larger ones
memory: members hold many at once."""

LEAST_LEAVES = 4096
"""A vector has this many leaves, or up to twice as many, unless that makes them smaller than a codec's block or larger
than a frame. Smaller leaves make audits cheaper, since an audit fetches a leaf of every contributor, with a proof of
some 400 bytes. Each leaf costs its reducer some 40 microseconds, and each member that hashes it two."""

MIN_AHEAD_FRAMES = 3
"""Slices that a member sends to an owner before it waits for a result, so that slices travel while another one is
reduced. On connections with a high latency this bounds the rate, and with it the rate that can be measured."""

MIN_MEMBERS_FOR_BACKUP = 3
"""Minimum members for a backup: with two, neither can replace the other."""


def fair_shares(bytes_per_s: tuple[int, ...]) -> tuple[float, ...]:
    """Return each owner's share of the work, in proportion to its bandwidth. Bandwidths are claims, so they are limited
    to within a factor of MAX_SKEW of their median. An unknown bandwidth (0) counts as the median."""
    known = [each for each in bytes_per_s if each]
    if not known:
        return (1.0,) * len(bytes_per_s)
    usual = statistics.median(known)
    return tuple(_share((each or usual) / usual) for each in bytes_per_s)


def _share(ratio: float) -> float:
    return 1.0 if 1 / NOISE < ratio < NOISE else min(max(ratio, 1 / MAX_SKEW), MAX_SKEW)


def part_values(num_values: int, bandwidths: tuple[float, ...]) -> tuple[int, ...]:
    """Return how many values each owner reduces, in proportion to `bandwidths`. They sum to `num_values`. Parts begin
    where leaves do."""
    edges, leaf = [0], leaf_values(num_values)
    passed = list(accumulate(bandwidths))  # and not `sum`, which rounds floats otherwise from Python 3.12 on
    for each in passed:
        edge = round(num_values * each / passed[-1] / leaf) * leaf
        edges.append(max(edges[-1], min(edge, num_values)))
    edges[-1] = num_values
    return tuple(stop - start for start, stop in pairwise(edges))


def part_sizes(num_values: int, members: tuple[Contribution, ...]) -> tuple[int, ...]:
    """Return the part size of each of `members`, by the bandwidths they reported. The floating-point arithmetic has a
    fixed order, so every member that recomputes it gets the same sizes."""
    return part_values(num_values, fair_shares(tuple(member.bytes_per_s for member in members)))


def leaf_values(num_values: int) -> int:
    """Return how many values each leaf of a vector of `num_values` has; the last one may have fewer. Leaves begin where
    encoded data can be cut."""
    blocks = num_values // (LEAST_LEAVES * CUT_VALUES)
    return min(max(blocks * CUT_VALUES, CUT_VALUES), FRAME_VALUES)


def num_leaves(num_values: int) -> int:
    return -(-num_values // leaf_values(num_values))


def leaf_at(num_values: int, index: int) -> slice:
    """Return the place of leaf `index` in the vector."""
    size = leaf_values(num_values)
    return slice(index * size, min((index + 1) * size, num_values))


def part_leaves(group: Group, index: int) -> range:
    """Return the indices of the leaves of part `index`."""
    stop, size = list(accumulate(group.part_values))[index], leaf_values(group.num_values)
    return range(-((group.part_values[index] - stop) // size), -(-stop // size))


def part_frames(group: Group, index: int) -> list[slice]:
    """Return the frames of part `index`, as slices of the whole vector. Each holds whole leaves."""
    stop = list(accumulate(group.part_values))[index]
    return frames_of(stop, stop - group.part_values[index], leaf=leaf_values(group.num_values))


def frames_of(stop: int, start: int = 0, *, leaf: int = 1) -> list[slice]:
    """Return the frames of the vector's values from `start` to `stop`. Each frame has whole leaves of `leaf` values."""
    size = FRAME_VALUES // leaf * leaf
    return [slice(at, min(at + size, stop)) for at in range(start, stop, size)]


def backup_peer(group: Group, part: int) -> str | None:
    """Return the member that takes over `part` if its owner fails, the owner of the next part, or None in groups too
    small for that."""
    peers = group.peer_ids
    return peers[(part + 1) % len(peers)] if len(peers) >= MIN_MEMBERS_FOR_BACKUP else None


def cut_leaves(codec: Codec, data: Data, num_values: int, leaf: int) -> list[bytes]:
    """Return the encoded leaves, of `leaf` values each, of an encoded frame of `num_values`. Raises CodecError if its
    size is wrong."""
    whole = num_values // leaf * leaf
    # leaves of one size have pieces of equal sizes, so numpy can join all of them at once
    pieces = codec.pieces(data, num_values, 0, whole) if whole else ()
    rows = [np.frombuffer(piece, dtype=np.uint8).reshape(whole // leaf, -1) for piece in pieces]
    leaves = [row.tobytes() for row in np.concatenate(rows, axis=1)] if rows else []
    if whole < num_values:
        leaves.append(b"".join(codec.pieces(data, num_values, whole, num_values)))
    return leaves


def num_values(frame: slice) -> int:
    return int(frame.stop - frame.start)


def part_bytes(group: Group, index: int, codec: Codec) -> int:
    """Return the encoded size of part `index`."""
    return sum(codec.encoded_bytes(num_values(frame)) for frame in part_frames(group, index))


def check_frame(codec: Codec, data: Data, size: int) -> None:
    """Check an encoded frame as every honest member does before it sends one. Raises CodecError if `data` does not
    encode `size` values, or moves a parameter further than the protocol allows."""
    _check_moves(codec.check(data, size))


def encode_slice(codec: Codec, feedback: ErrorFeedback | None, delta_N: Tensor, frame: slice) -> bytes:
    """Return the encoded slice of this member's contribution. Raises RoundError. Blocks."""
    buffer = bytearray(codec.encoded_bytes(num_values(frame)))
    encode_slice_into(buffer, codec, feedback, delta_N, frame)
    return bytes(buffer)


def encode_slice_into(
    buffer: bytearray | memoryview, codec: Codec, feedback: ErrorFeedback | None, delta_N: Tensor, frame: slice
) -> None:
    """Write what `encode_slice` returns into `buffer`."""
    try:
        if feedback is not None:
            buffer[:] = feedback.encode(delta_N[frame], frame.start)
        else:
            codec.encode_into(delta_N[frame], buffer)
    except CodecError as error:
        raise RoundError(f"this member's contribution cannot be encoded: {error}") from error


def decode_frame(codec: Codec, data: Data, size: int) -> Tensor:
    """Return the values [size] of `data`. Raises CodecError where `check_frame` does."""
    x_F = torch.empty(size)
    _check_moves(codec.decode_into(data, x_F))
    return x_F


def _check_moves(largest: float) -> None:
    if not largest <= limits.MAX_PARAMETER_MOVE:
        raise CodecError(f"a parameter moves by {largest:.3g}")


def decoded_frames(group: Group, parts: Sequence[Data], codec: Codec) -> Iterator[tuple[slice, Tensor]]:
    """Yield each frame's place in the vector and its values [F], as `parts` encode them.

    Raises IntegrityError if the parts do not belong to this group, or if no honest member can have made them.
    """
    if len(parts) != len(group.part_values):
        raise IntegrityError(f"{len(parts)} parts of {len(group.part_values)}")
    for index, part in enumerate(parts):
        if len(part) != (size := part_bytes(group, index, codec)):
            raise IntegrityError(f"part {index} has {len(part)} bytes instead of {size}")
        for frame, encoded in encoded_frames(group, index, part, codec):
            try:
                delta_F = decode_frame(codec, encoded, num_values(frame))
            except CodecError as error:
                raise IntegrityError(f"part {index} cannot be decoded: {error}") from error
            yield frame, delta_F


def encoded_frames(group: Group, index: int, part: Data, codec: Codec) -> Iterator[tuple[slice, memoryview]]:
    """Yield the frames of an encoded result of part `index`, each with its place in the vector."""
    view, at = memoryview(part), 0
    for frame in part_frames(group, index):
        stop = at + codec.encoded_bytes(num_values(frame))
        yield frame, view[at:stop]
        at = stop


def part_digests(parts: Sequence[Data]) -> tuple[bytes, ...]:
    """Return the digests by which an outcome names its encoded `parts`. Blocks."""
    return tuple(hashlib.sha256(part).digest() for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionScheme:
    """Says how a run reduces vectors. `probation` gives contributions their weights. `feedback` encodes this member's
    contribution in a run with error feedback."""

    codec: Codec
    aggregator: Aggregator
    feedback: ErrorFeedback | None = None
    probation: Probation = field(default_factory=Probation)


class Residuals:
    """Error feedback of one member, for each fragment: what the codec lost of a contribution is added to the next one.

    A fragment's residual is committed once a committed state holds the contribution (`reductions.settle`). Until
    then each attempt sends the same bytes. Residuals are in no state and no checkpoint, and start at zero after a
    restart. They take 8 bytes for each value of the fragments that this member has contributed to.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._feedbacks: dict[tuple[int, int], ErrorFeedback] = {}

    def of(self, fragment: slice) -> ErrorFeedback:
        """Return the error feedback of `fragment`, a slice of the flat vector."""
        key = (fragment.start, fragment.stop)
        if key not in self._feedbacks:
            self._feedbacks[key] = ErrorFeedback(self._codec, fragment.stop - fragment.start)
        return self._feedbacks[key]

    def settle(self, fragment: slice, *, is_committed: bool) -> None:
        """End the step of `fragment`: commit or discard what the codec lost of this member's contribution. Blocks the
        thread."""
        if (fragment.start, fragment.stop) in self._feedbacks:
            feedback = self.of(fragment)
            if is_committed:
                feedback.commit()
            else:
                feedback.rollback()


class PartResult:
    """One part's result at one member, as it grows frame by frame.

    The first `have` frames of the result are there. At the backup, `kept` are the owner's slices, and `kept_proof`
    shows that the owner committed to them. The owner and its backup send the same bytes, so the first copy of a frame
    to arrive counts. At the owner, a frame's place in the buffer may hold the owner's own slice until the result
    replaces it. One task owns this object.

    After `drop`, all access to frames raises RoundError, also in tasks that wait for frames.
    """

    def __init__(self, group: Group, index: int, codec: Codec) -> None:
        self.index = index
        self.owner = group.peer_ids[index]
        self.frames = part_frames(group, index)
        self.have = 0
        self.kept: list[bytes] = []
        self.kept_proof = b""
        sizes = [codec.encoded_bytes(num_values(frame)) for frame in self.frames]
        self._places = [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
        self.data = bytearray(sum(sizes))
        self._is_dropped = False
        self._failure: SwarmError | None = None
        self._changed = asyncio.Event()

    @property
    def complete(self) -> bool:
        return self.have == len(self.frames)

    def put(self, index: int, data: Data) -> None:
        """Store one frame of the result, whose size has been checked. Raises RoundError if another version of the frame
        is there already."""
        if index == self.have:
            self.frame(index)[:] = data
            self.have_next()
        elif self.frame(index) != data:
            raise RoundError("the part's owner and its backup give different results")

    def have_next(self) -> None:
        """Record that the result's next frame is in its place."""
        self.have += 1
        self._notify()

    def keep(self, data: bytes) -> bool:
        """Store the owner's slice of the next frame. Return False if its size is wrong."""
        self._check_held()
        place = self._places[len(self.kept)]
        if len(data) != place.stop - place.start:
            return False
        self.kept.append(data)
        self._notify()
        return True

    def frame(self, index: int) -> memoryview:
        """Return the place of frame `index`. The owner writes the result here, after which it does not change any
        more."""
        self._check_held()
        return memoryview(self.data)[self._places[index]]

    def drop(self) -> None:
        """Release the frames, since the step is over. Callers that have taken `data` keep it."""
        self.data, self._is_dropped = bytearray(), True
        self.kept.clear()
        self._notify()

    def fail(self, error: SwarmError) -> None:
        """Raise `error` in every task that waits for frames by `wait_for_frames`."""
        self._failure = error
        self._notify()

    async def wait_for_frames(self, num_frames: int, *, ignore_failure: bool = False) -> None:
        """Wait until `num_frames` frames of the result are there. Raises what `fail` was given, unless
        `ignore_failure`."""
        while self.have < num_frames:
            self._check_held()
            if self._failure is not None and not ignore_failure:
                raise self._failure
            await self._changed.wait()

    async def wait_for_kept(self, num_slices: int) -> None:
        """Wait until `num_slices` of the owner's slices are there."""
        while len(self.kept) < num_slices:
            self._check_held()
            await self._changed.wait()

    def _check_held(self) -> None:
        if self._is_dropped:
            raise RoundError("the step is over")

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class CaughtLying(PeerViolation):
    """A member has done what no honest member does, as the first piece of `evidence` shows to anyone. Further pieces
    are against members that lied together with it."""

    def __init__(self, message: str, *, peer_id: str, evidence: tuple[Evidence, ...]) -> None:
        super().__init__(message, peer_id=peer_id)
        self.evidence = evidence


class UndecodableSlice(PeerViolation):
    """A member has sent `data` as its slice of `frame`, a place in the step's vector, and it cannot be decoded."""

    def __init__(self, message: str, *, peer_id: str, data: Data, frame: slice) -> None:
        super().__init__(message, peer_id=peer_id)
        self.data = data
        self.frame = frame
