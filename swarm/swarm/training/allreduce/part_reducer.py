"""The arithmetic of everyone who reduces a part, between the decoding of its slices and the encoding of its result:
its owner or backup, a cluster's head, and those who check a leaf.

Shapes: F values of a frame, L leaves, V values of a leaf.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_compression import CodecError
from swarm_compression.codec import Data
from swarm_protocol.errors import RoundError
from swarm_protocol.training_messages import Contribution, Group
from torch import Tensor

from swarm.training.allreduce.parts import (
    ReductionScheme,
    UndecodableSlice,
    check_frame,
    decode_frame,
    leaf_values,
    num_values,
)
from swarm.training.standing.held_out_scores import discounted_weights
from swarm.trust.aggregation import Aggregation
from swarm.trust.kernels import blocks
from swarm.trust.mixing import leaf_beacon

logger = logging.getLogger(__name__)

QUICK_MEMBERS = 8
"""The sum of a frame of this many members takes 0.1 to 0.2 ms with a quick codec."""
NOTABLE_KEPT = 0.5
"""A member that keeps less of its weight is reported. Aggregators shorten the longest honest contributions a little,
too: the least that one of them kept, of five to eight members, was 0.9 by default, and 0.4 with CenteredClip of
radius 1."""
BATCH_VALUES = 1 << 18
"""The values of all members' leaves that are aggregated together: 2 MiB as fp64."""
NOTABLE_VALUES = 256
"""A part of fewer values tells nothing of a contribution's length."""


class PartReducer:
    """Aggregates one part of the contributions of `members` frame by frame, and each leaf of `leaf_values` on its own.

    A leaf's result follows from that leaf's slices alone, so that every holder of these can check it. Everything here
    blocks: call it off the loop, one frame after the other, except where `is_quick`. Weights follow from the group's
    tokens and members' standing, which the check of the group has capped by the leases. Slices are passed in the
    order of `contributors`, and each frame with its place in the step's vector, which begins where a leaf does.
    `beacon` returns the random bytes of a leaf, by its index (`mixing.leaf_beacon`).
    """

    def __init__(
        self,
        scheme: ReductionScheme,
        members: Sequence[Contribution],
        leaf_values: int,
        beacon: Callable[[int], bytes],
    ) -> None:
        self.contributors: Sequence[Contribution] = [member for member in members if member.num_tokens]
        self._codec = scheme.codec
        self._aggregator = scheme.aggregator
        weights = scheme.probation.weights(self.contributors)
        self._weights = discounted_weights(self.contributors, weights)
        self._leaf_values = leaf_values
        self._beacon = beacon
        # what depends on no slice is decided once
        self._fixed = self._aggregation([b""]) if scheme.aggregator.is_fixed else None
        if self._fixed is not None:
            self._fixed.decide()
        self._kept = [0.0] * len(self.contributors)
        self._num_aggregated = 0
        self._note = ""

    @classmethod
    def of_group(cls, scheme: ReductionScheme, group: Group) -> PartReducer:
        """Return what reduces the slices of `group`'s contributors."""
        beacon = partial(leaf_beacon, group.run, group.step, group.state_digest)
        return cls(scheme, group.members, leaf_values(group.num_values), beacon)

    @property
    def is_quick(self) -> bool:
        """Return whether `reduce` takes less time than handing a frame to a thread and back."""
        is_sum = self._fixed is not None and self._fixed.is_sum
        return is_sum and self._codec.is_quick and len(self.contributors) <= QUICK_MEMBERS

    @property
    def is_fixed(self) -> bool:
        """Return whether the coefficients of the slices depend on no slice."""
        return self._fixed is not None

    @property
    def leaves_at_once(self) -> int:
        """Return how many leaves are aggregated together at most."""
        return max(1, BATCH_VALUES // (len(self.contributors) * self._leaf_values))

    @property
    def kept_shares(self) -> dict[str, float]:
        """The share of its weight that each notably reduced member keeps, by peer, so far."""
        if self._num_aggregated < NOTABLE_VALUES:
            return {}
        shares = (kept / self._num_aggregated for kept in self._kept)
        kept = zip(self.contributors, shares, strict=True)
        return {member.peer_id: share for member, share in kept if share < NOTABLE_KEPT}

    def reduce(self, encoded: Sequence[Data], frame: slice, buffer: bytearray | memoryview) -> None:
        """Write the frame's encoded result into `buffer`, where one of the slices may lie. Raises PeerViolation, which
        names the sender of a slice that cannot be decoded, and RoundError if the result cannot be encoded."""
        if self._fixed is not None and self._fixed.is_sum:
            self._check(encoded, frame)
            with _encoding():
                # the bits of `Aggregation.combine`, without a decoded frame in between
                self._codec.combine(encoded, self._fixed.coefficients, num_values(frame), buffer)
        else:
            result_F = self.combined(encoded, frame)
            with _encoding():
                self._codec.encode_into(result_F, buffer)

    def combined(self, encoded: Sequence[Data], frame: slice) -> Tensor:
        """Return the frame's result [F] as it is before it is encoded. Raises PeerViolation as `reduce` does."""
        size = num_values(frame)
        if self._fixed is not None:
            return torch.from_numpy(self._fixed.combine(self._rows(encoded, frame)))
        rows, result_F = list(self._rows(encoded, frame)), torch.empty(size)
        for batch in self._batches(size):
            first = (frame.start + batch.start) // self._leaf_values
            leaves = range(first, first + -(-num_values(batch) // self._leaf_values))
            result_F[batch] = torch.from_numpy(self._aggregated([row_F[batch] for row_F in rows], leaves))
        return result_F

    def combined_leaves(self, encoded: Sequence[Sequence[Data]], leaves: Sequence[int], size: int) -> Tensor:
        """Return the results [L, V] of some leaves of `size` values, wherever they are, together: with few values a
        leaf costs little more than its share of the calls. `encoded` are the slices of each. Raises PeerViolation as
        `reduce` does."""
        frames = [slice(leaf * self._leaf_values, leaf * self._leaf_values + size) for leaf in leaves]
        by_leaf = [list(self._rows(slices, frame)) for slices, frame in zip(encoded, frames, strict=True)]
        rows = [np.concatenate(of_member) for of_member in zip(*by_leaf, strict=True)]
        return torch.from_numpy(self._aggregated(rows, leaves).reshape(len(leaves), size))

    def _batches(self, size: int) -> Iterator[slice]:
        """Yield the ranges of a frame's leaves that are aggregated together, which are of one size: the last leaf may
        be shorter."""
        whole = size // self._leaf_values * self._leaf_values
        yield from blocks(whole, self.leaves_at_once * self._leaf_values)
        if whole < size:
            yield slice(whole, size)

    def _aggregation(self, beacons: Sequence[bytes]) -> Aggregation:
        return Aggregation(self._aggregator, self._weights, beacons)

    def _aggregated(self, rows: Sequence[NDArray[Any]], leaves: Sequence[int]) -> NDArray[Any]:
        """Return the result of these leaves, which have one size."""
        size = len(rows[0])
        aggregation = self._aggregation([self._beacon(leaf) for leaf in leaves])
        if aggregation.has_survey:
            aggregation.survey(rows)
        report = aggregation.decide()
        if report.note and not self._note:
            self._note = report.note
            logger.warning("in this member's part, %s", report.note)
        self._num_aggregated += size
        for index, share in enumerate(report.kept):
            self._kept[index] += share * size
        return aggregation.combine(rows)

    def _check(self, encoded: Sequence[Data], frame: slice) -> None:
        for member, data in zip(self.contributors, encoded, strict=True):
            with _decoding_slice_of(member, data, frame):
                check_frame(self._codec, data, num_values(frame))

    def _rows(self, encoded: Sequence[Data], frame: slice) -> Iterator[NDArray[Any]]:
        for member, data in zip(self.contributors, encoded, strict=True):
            with _decoding_slice_of(member, data, frame):
                x_F = decode_frame(self._codec, data, num_values(frame))
            yield x_F.numpy()


@contextmanager
def _encoding() -> Iterator[None]:
    try:
        yield
    except CodecError as error:
        raise RoundError(f"the result cannot be encoded: {error}") from error


@contextmanager
def _decoding_slice_of(member: Contribution, data: Data, frame: slice) -> Iterator[None]:
    try:
        yield
    except CodecError as error:
        reason = f"it sent a bad slice: {error}"
        raise UndecodableSlice(reason, peer_id=member.peer_id, data=data, frame=frame) from error
