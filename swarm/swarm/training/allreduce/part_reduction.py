"""Reduces one part: its owner reads the members' slices frame by frame over the streams that they open, aggregates each
frame, and sends the encoded result to all members.

`PartReducer` is the arithmetic between the decoding of slices and the encoding of their result. A part's backup, a
cluster's head, and members that check a leaf use it, too. `butterfly` owns the tasks; `backup_owner` makes the part if
its owner fails.

Shapes: F values of a frame, L leaves, V values of a leaf.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_compression import CodecError
from swarm_compression.codec import Data
from swarm_protocol.errors import PeerError, RoundError, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.reduction_messages import ReduceOpening
from swarm_protocol.training_messages import Contribution, Group
from torch import Tensor

from swarm.network.interface import EndOfStream, Stream
from swarm.training.allreduce.committed_slices import MadePart
from swarm.training.allreduce.part_streams import RESULTS_SHARE, SLICES_SHARE, PartStreams, not_of_others
from swarm.training.allreduce.parts import (
    PartResult,
    ReductionScheme,
    UndecodableSlice,
    backup_peer,
    check_frame,
    decode_frame,
    leaf_values,
    num_values,
)
from swarm.training.standing.held_out_scores import discounted_weights
from swarm.trust.kernels import blocks
from swarm.trust.leaf_aggregation import Aggregation
from swarm.trust.mixing import leaf_beacon

logger = logging.getLogger(__name__)

OPENING_S = 1.0
"""Seconds for which slices to an owner on a slow connection wait for that owner's stream. Members learn of their group
within a fraction of this time of each other."""
QUICK_MEMBERS = 8
"""Largest number of members for which a frame is summed on the event loop: with a quick codec that takes 0.1 to 0.2
ms."""
NOTABLE_KEPT = 0.5
"""A member that keeps a smaller share of its weight is reported. Aggregators shorten the longest honest contributions a
little, too: the least that one of them kept, of five to eight members, was 0.9 by default, and 0.4 with CenteredClip of
radius 1."""
BATCH_VALUES = 1 << 18
"""Maximum values of all members that are aggregated together: 2 MiB as fp64."""
NOTABLE_VALUES = 256
"""Values below which a part says nothing about the length of a contribution."""


class PartOwner:
    """Reduces the part that this member owns. The result grows in `part`; `close` ends the waiting streams.

    Slices arrive over the streams that other members open; the task that accepted a stream serves it.
    """

    def __init__(self, streams: PartStreams, part: PartResult) -> None:
        self._streams = streams
        self._group = streams.group
        self._part = part
        self.made = MadePart(streams.group, part, streams.scheme.codec)
        self.made.commit(streams.me, streams.own_proof(part.index))
        self.reducer = PartReducer.of_group(streams.scheme, streams.group)
        self._inboxes = {peer: streams.inbox(peer) for peer in self._group.peer_ids}
        self._accepted: dict[str, asyncio.Future[Stream]] = {}
        self._delivering: dict[str, asyncio.Task[None]] = {}
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()
        for stream in self._accepted.values():
            stream.cancel()

    async def serve(self, peer: str, opening: ReduceOpening, stream: Stream) -> None:
        """Receive `peer`'s slices and keep the stream for its result, until the reduction has ended."""
        self.made.commit(peer, opening.proof)
        accepted = self._accepted_from(peer)
        if not accepted.done():
            accepted.set_result(stream)
        try:
            await self._inboxes[peer].fill(stream)
            await self._closed.wait()
        finally:
            # a stream belongs to its handler, so it must not be used after this
            self.stop_delivery(peer)

    async def until_opened_by(self, peer: str) -> None:
        """Return once `peer` has opened its stream to this part, or has had OPENING_S for that."""
        if self._part.frames:
            with suppress(TimeoutError):
                async with asyncio.timeout(OPENING_S):
                    await asyncio.shield(self._accepted_from(peer))

    def stop_delivery(self, peer: str) -> None:
        """Send no more of the result to `peer`."""
        if delivering := self._delivering.get(peer):
            delivering.cancel()

    def lacks(self, peer: str) -> bool:
        """Return whether `peer` left before all its slices had arrived: without them this part cannot be reduced."""
        inbox, contributes = self._inboxes[peer], peer in [each.peer_id for each in self.reducer.contributors]
        return contributes and not inbox.is_filling and inbox.num_received < len(self._part.frames)

    async def reduce(self) -> None:
        peers = [member.peer_id for member in self.reducer.contributors]
        for index in range(len(self._part.frames)):
            # no variable may hold a frame's slices while those of the next frame arrive: they take memory
            await self._reduce_frame(index, [await self._slice(peer, index) for peer in peers])

    async def _reduce_frame(self, index: int, encoded: Sequence[Data]) -> None:
        streams, frame = self._streams, self._part.frames[index]
        if index == 0:
            await streams.failpoints.reached("round.reducing")
        buffer = self._part.frame(index)
        if self.reducer.is_quick:
            self.reducer.reduce(encoded, frame, buffer)
        else:
            await streams.off_loop(self.reducer.reduce, encoded, frame, buffer)
        if index == 0:
            await streams.failpoints.reached("round.reduced")
        self._part.have_next()

    async def hand_out(self) -> None:
        """Send the result to all other members, and at the same time this member's slices to the backup."""
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self._leave_with_backup(), name="leave with backup")
            async with asyncio.TaskGroup() as deliveries:
                for peer in self._group.peer_ids:
                    if peer != self._part.owner:
                        self._delivering[peer] = deliveries.create_task(self._deliver(peer), name="deliver")
            keeping.cancel()

    async def _slice(self, peer: str, index: int) -> Data:
        if peer == self._part.owner:
            # encoded into the place that the result will take
            buffer = self._part.frame(index)
            await self._streams.encode(self._part.frames[index], buffer)
            self.made.keep(peer, bytes(buffer))
            return buffer
        # less than members wait for the result: the owner must find and name the peer that delays everyone
        limit_s = min(self._group.reduce_s / 2, self._streams.left_s(SLICES_SHARE))
        try:
            data = await self._streams.expect(peer, self._inboxes[peer], limit_s)
        except TimeoutError:
            raise PeerError(f"it sent no slice within {max(limit_s, 0.0):.0f} s", peer_id=peer) from None
        except SwarmError as error:
            raise not_of_others(error, peer) from error
        self.made.keep(peer, data)
        return data

    async def _deliver(self, peer: str) -> None:
        """Send the result to `peer`, in the time for results. A failure concerns `peer` alone."""
        try:
            async with asyncio.timeout(self._streams.left_s(RESULTS_SHARE)):
                stream = await self._accepted_from(peer)
                sending = self._streams.send_result(stream, self._part, phase="round.deliver")
                await self._streams.while_there(peer, sending)
                await stream.finish()
        except (SwarmError, TimeoutError) as error:
            logger.info("could not hand a result to %s: %s", short_id(peer), error)

    async def _leave_with_backup(self) -> None:
        backup = backup_peer(self._group, self._part.index)
        if backup is None or not self._streams.contributes:
            return
        try:
            opening = self._streams.slices_opening("keep", self._part.index)
            async with self._streams.open(backup, opening) as stream:
                await self._streams.send_slices(stream, self._part)
                await stream.finish()
                with suppress(EndOfStream):
                    while True:  # the other side ends the stream once it has everything
                        await stream.receive()
        except SwarmError as error:
            logger.warning("%s cannot stand in for this member: %s", short_id(backup), error)

    def _accepted_from(self, peer: str) -> asyncio.Future[Stream]:
        if peer not in self._accepted:
            self._accepted[peer] = asyncio.get_running_loop().create_future()
        return self._accepted[peer]


class PartReducer:
    """Aggregates one part of the contributions of `members` frame by frame, and each leaf of `leaf_values` on its own.

    A leaf's result depends on that leaf's slices alone, so that every holder of these can check it. Everything here
    blocks: unless `is_quick`, call it off the loop, one frame after the other. Weights follow from the members'
    standing and their tokens, which the check of the group has capped by the leases. Slices are passed in the order of
    `contributors`. Each frame is passed with its place in the step's vector, which begins where a leaf does. `beacon`
    returns the random bytes of a leaf, by its index (`mixing.leaf_beacon`).
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
        # coefficients that depend on no slice are decided once
        self._fixed = self._aggregation([b""]) if scheme.aggregator.is_fixed else None
        if self._fixed is not None:
            self._fixed.decide()
        self._kept = [0.0] * len(self.contributors)
        self._num_aggregated = 0
        self._note = ""

    @classmethod
    def of_group(cls, scheme: ReductionScheme, group: Group) -> PartReducer:
        """Return the reducer for the slices of `group`'s contributors."""
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
        """Return the maximum number of leaves that are aggregated together."""
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
                # gives the same bits as `Aggregation.combine`, without a decoded frame in between
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
        """Return the results [L, V] of `leaves` of `size` values each, which need not be adjacent, from one call: with
        few values per leaf, most of the time is the overhead of a call. `encoded` are the slices of each leaf. Raises
        PeerViolation as `reduce` does."""
        frames = [slice(leaf * self._leaf_values, leaf * self._leaf_values + size) for leaf in leaves]
        by_leaf = [list(self._rows(slices, frame)) for slices, frame in zip(encoded, frames, strict=True)]
        rows = [np.concatenate(of_member) for of_member in zip(*by_leaf, strict=True)]
        return torch.from_numpy(self._aggregated(rows, leaves).reshape(len(leaves), size))

    def _batches(self, size: int) -> Iterator[slice]:
        """Yield the ranges of a frame whose leaves are aggregated together. The leaves of a range have one size; the
        last leaf may be shorter."""
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
