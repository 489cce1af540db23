"""The reduction of one vector among the members of a signed group: the data plane of a round.

Each member owns one part. It opens one stream to each other owner, on which it sends its slice of that part, encoded
frame by frame, and gets back the part's result. An owner reads the members' frames in the group's order, so the result
does not depend on who was quick, aggregates them (`part_owner`), encodes the result once, and forwards these bytes
verbatim: its own result is the decoded one, like everybody's. Memory beyond the vectors is a frame a member, and if the
aggregator surveys the whole part first, its slices as they came: then no result leaves before all of them are there.

A frame whose size, format or finiteness is wrong ends the reduction, with its sender named. After a failure nothing is
torn down until the caller cancels: others would see streams break and blame this member before they hear the reason.

`Butterfly.run` owns the tasks. Shapes: N values of the vector, F values of a frame.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from swarm_compression import CodecError
from swarm_compression.codec import Data
from swarm_protocol.errors import PeerError, PeerRefused, PeerUnreachable, PeerViolation, RoundError, SwarmError
from torch import Tensor

from swarm.network.interface import EndOfStream, Network, Stream
from swarm.network.phases import FaultHook, no_faults
from swarm.training.part_owner import PartOwner, Scheme
from swarm.training.parts import num_values, part_frames
from swarm.training.round_events import Signed
from swarm.trust.aggregation.aggregator import Report

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """`parts` are the encoded results: what all members must have alike."""

    parts: tuple[Data, ...]

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(hashlib.sha256(part).digest() for part in self.parts)


class Butterfly:
    """One member's side of one reduction. `delta_N`: fp32, what it contributes; None: nothing."""

    def __init__(
        self,
        network: Network,
        method: str,
        signed: Signed,
        delta_N: Tensor | None,
        scheme: Scheme,
        executor: Executor,
        *,
        on_failure: Callable[[SwarmError], None],
        faults: FaultHook = no_faults,
    ) -> None:
        """`method` is where each member's stream handler calls `attend` of the butterfly for the same group.

        `on_failure` hears of the first failure. PeerViolation and PeerError name the peer at fault.
        """
        self._network = network
        self._method = method
        self._signed = signed
        self._group = signed.group
        self._me = signed.group.peer_ids.index(network.peer_id)
        self._delta_N = delta_N if signed.group.members[self._me].num_tokens else None
        self._codec = scheme.codec
        self._owner = PartOwner(scheme, signed.group)
        self._executor = executor
        self._on_failure = on_failure
        self._faults = faults
        self._streams: dict[str, asyncio.Future[Stream]] = {}
        self._attending: set[str] = set()
        self._gone: set[str] = set()
        self._results: list[asyncio.Future[bytes]] = []
        self._parts = [bytearray() for _ in signed.group.members]
        self._failed = False
        self._closed = asyncio.Event()
        self.bytes_sent = 0

    @property
    def digest(self) -> bytes:
        """Of the signed group, which names the reduction."""
        return self._signed.digest

    @property
    def report(self) -> Report:
        """What the aggregation of this member's part did to whom, by the order of those who contribute."""
        return self._owner.report

    async def run(self) -> Reduction:
        """All parts' results, once this member has also handed out its own. After a failure: never, until cancelled."""
        loop = asyncio.get_running_loop()
        others = [peer for peer in self._group.peer_ids if peer != self._network.peer_id]
        own_frames = part_frames(self._group, self._me)
        self._results = [loop.create_future() for _ in own_frames]
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._hold(self._own_part(own_frames)), name="own part")
                for peer in others:
                    # of a vector with fewer blocks than members, some members own nothing
                    if own_frames:
                        tasks.create_task(self._deliver(peer), name=f"deliver to {peer[-6:]}")
                    tasks.create_task(self._exchange(peer, tasks), name=f"exchange with {peer[-6:]}")
        finally:
            self._closed.set()
            for stream in self._streams.values():
                stream.cancel()
            for result in self._results:
                result.cancel()
        return Reduction(parts=tuple(self._parts))

    async def attend(self, peer: str, stream: Stream) -> None:
        """Take `peer`'s stream for this member's own part, and keep it until the reduction has ended."""
        if peer not in self._group.peer_ids or peer in self._attending or self._closed.is_set():
            raise PeerViolation("a second stream for one part, or one from outside its group", peer_id=peer)
        self._attending.add(peer)
        future = self._stream_of(peer)
        if not future.done():
            future.set_result(stream)
        try:
            await self._closed.wait()
        finally:
            # a stream is its handler's: nobody may use it after this
            self._gone.add(peer)

    def _stream_of(self, peer: str) -> asyncio.Future[Stream]:
        if peer not in self._streams:
            self._streams[peer] = asyncio.get_running_loop().create_future()
        return self._streams[peer]

    async def _hold(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`. If it fails, report that and keep everything open until cancelled."""
        try:
            await work
        except SwarmError as error:
            if not self._failed:
                self._failed = True
                self._on_failure(error)
            await asyncio.get_running_loop().create_future()

    async def _off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def _own_part(self, frames: list[slice]) -> None:
        """Reduce frame after frame of this member's part."""
        if not frames:
            return
        surveyed = deque[list[bytes]]()
        for frame in frames if self._owner.has_survey else ():
            surveyed.append(await self._slices(frame))
            await self._off_loop(self._owner.survey, surveyed[-1], num_values(frame))
        await self._off_loop(self._owner.decide)
        for frame, result in zip(frames, self._results, strict=True):
            encoded = surveyed.popleft() if surveyed else await self._slices(frame)
            if frame is frames[0]:
                await self._faults.reached("round.reducing")
            data = await self._off_loop(self._owner.reduce, encoded, num_values(frame))
            if frame is frames[0]:
                await self._faults.reached("round.reduced")
            self._parts[self._me] += data
            result.set_result(data)

    async def _slices(self, frame: slice) -> list[bytes]:
        return [await self._slice_of(member.peer_id, frame) for member in self._owner.contributors]

    async def _slice_of(self, peer: str, frame: slice) -> bytes:
        if peer == self._network.peer_id:
            return await self._off_loop(self._encode, frame)
        # half of what members wait for the result: the owner is to find out, and to say, who keeps all waiting
        limit_s = self._group.reduce_s / 2
        try:
            async with asyncio.timeout(limit_s):
                stream = await self._stream_of(peer)
                self._check_there(peer)
                return await stream.receive()
        except TimeoutError:
            raise PeerError(f"it sent no slice within {limit_s:.0f} s", peer_id=peer) from None
        except EndOfStream:
            raise PeerViolation("it sent too few values", peer_id=peer) from None
        except SwarmError as error:
            raise _not_of_others(error, peer) from error

    def _encode(self, frame: slice) -> bytes:
        assert self._delta_N is not None
        try:
            return self._codec.encode(self._delta_N[frame])
        except CodecError as error:
            raise RoundError(f"this member's contribution cannot be encoded: {error}") from error

    async def _deliver(self, peer: str) -> None:
        """Hand `peer` the results of this member's part. That it cannot be had is `peer`'s loss alone."""
        try:
            stream = await self._stream_of(peer)
            for result in self._results:
                data = await asyncio.shield(result)
                if result is self._results[0]:
                    await self._faults.reached("round.deliver")
                self._check_there(peer)
                await stream.send(data)
                self.bytes_sent += len(data)
            if peer not in self._gone:
                await stream.finish()
        except SwarmError as error:
            logger.warning("could not hand a result to %s: %s", peer[-6:], error)

    def _check_there(self, peer: str) -> None:
        if peer in self._gone:
            raise PeerUnreachable("it has left the reduction", peer_id=peer)

    async def _exchange(self, owner: str, tasks: asyncio.TaskGroup) -> None:
        """Send `owner` this member's slice of its part, and take the result."""
        index = self._group.peer_ids.index(owner)
        if frames := part_frames(self._group, index):
            await self._hold(self._converse(owner, frames, index, tasks))

    async def _converse(self, owner: str, frames: list[slice], index: int, tasks: asyncio.TaskGroup) -> None:
        try:
            async with self._network.stream(owner, self._method, timeout_s=self._group.reduce_s) as stream:
                await stream.send(self._signed.data)
                self.bytes_sent += len(self._signed.data)
                sending = tasks.create_task(self._hold(self._send_slice(owner, stream, frames)), name="send slice")
                await self._hold(self._take_result(owner, stream, frames, index))
                await sending
        except PeerRefused as error:
            raise PeerError(f"it refuses its part: {error}", peer_id=owner) from error
        except SwarmError as error:
            raise _not_of_others(error, owner) from error

    async def _send_slice(self, owner: str, stream: Stream, frames: list[slice]) -> None:
        if self._delta_N is None:
            return
        for frame in frames:
            data = await self._off_loop(self._encode, frame)
            try:
                await stream.send(data)
            except SwarmError as error:
                raise _not_of_others(error, owner) from error
            self.bytes_sent += len(data)
            await self._faults.reached("round.slice")
        await stream.finish()

    async def _take_result(self, owner: str, stream: Stream, frames: list[slice], index: int) -> None:
        for frame in frames:
            try:
                data = await stream.receive()
                # nobody but its sender is to blame for bytes that cannot be decoded
                await self._off_loop(self._codec.decode, data, num_values(frame))
            except EndOfStream:
                raise PeerViolation("it sent too little of its result", peer_id=owner) from None
            except SwarmError as error:
                raise _not_of_others(error, owner) from error
            except CodecError as error:
                raise PeerViolation(f"it sent a bad result: {error}", peer_id=owner) from error
            self._parts[index] += data


def _not_of_others(error: SwarmError, peer: str) -> SwarmError:
    """`error`, as it came over `peer`'s stream: that it blames another one proves nothing about the other.

    One that blames nobody is `peer`'s own, or it could give up one attempt after the other.
    """
    if isinstance(error, PeerError) and error.peer_id == peer:
        return error
    return PeerError(f"it gave up: {error.message}", peer_id=peer)
