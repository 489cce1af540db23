"""The reduction of one vector among the members of a signed group: the data plane of a round.

Each member owns one part. It opens one stream to each other owner, on which it sends its slice of that part, encoded
frame by frame, and gets back the part's result. An owner reads the members' frames in the group's order, so the result
does not depend on who was quick, aggregates them (`part_owner`), encodes the result once, and forwards these bytes
verbatim: everybody has the same ones. Memory beyond the vector is the encoded result, some frames a member, and if the
aggregator surveys the whole part first, its slices as they came: then no result leaves before all of them are there.

A part whose owner dies or falls silent after it has sent its slices is finished by its backup (`stand_in`).

A frame whose size, format or finiteness is wrong ends the reduction, with its sender named. After a failure nothing is
torn down until the caller cancels: others would see streams break and blame this member before they hear the reason.

`Butterfly.run` owns the tasks. Shapes: N values of the vector, F values of a frame.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from swarm_compression import CodecError
from swarm_compression.codec import Data
from swarm_protocol.errors import PeerError, PeerRefused, PeerTimeout, PeerViolation, RoundError, SwarmError
from swarm_protocol.training_messages import ReduceOpening
from torch import Tensor

from swarm.network.interface import EndOfStream, Network, Stream
from swarm.network.phases import FaultHook, no_faults
from swarm.training.inbox import Inbox
from swarm.training.part_owner import PartOwner, Scheme
from swarm.training.part_result import PartResult
from swarm.training.parts import num_values
from swarm.training.round_events import Signed
from swarm.training.stand_in import MIN_MEMBERS, StandIn, backup_of
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
        self._scheme = scheme
        self._codec = scheme.codec
        self._feedback = scheme.feedback
        self._owner = PartOwner(scheme, signed.group)
        self._executor = executor
        self._on_failure = on_failure
        self._faults = faults
        self._parts = [PartResult(signed.group, index, scheme.codec) for index in range(len(signed.group.members))]
        self._inboxes = {peer: Inbox(peer) for peer in signed.group.peer_ids}
        self._streams: dict[str, asyncio.Future[Stream]] = {}
        self._attended: set[tuple[str, str]] = set()
        self._delivering: dict[str, asyncio.Task[None]] = {}
        self._standing_in: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
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
        try:
            async with asyncio.TaskGroup() as self._tasks:
                # of a vector with fewer blocks than members, some members own nothing
                if self._parts[self._me].frames:
                    self._tasks.create_task(self._hold(self._own_part()), name="own part")
                    self._tasks.create_task(self._hand_out(), name="hand out")
                for part in self._parts:
                    if part.index != self._me and part.frames:
                        self._tasks.create_task(self._exchange(part), name=f"exchange with {part.owner[-6:]}")
        finally:
            self._closed.set()
            for stream in self._streams.values():
                stream.cancel()
        return Reduction(parts=tuple(part.data for part in self._parts))

    # --- what other members open -------------------------------------------------------------------------------------

    async def attend(self, peer: str, stream: Stream) -> None:
        """Serve `peer`'s stream, from behind the signed group on. One that is for this member's own part is kept until
        the reduction has ended; what backups and their askers need can be had for longer."""
        if peer not in self._group.peer_ids:
            raise PeerViolation("a stream from outside its group", peer_id=peer)
        opening = ReduceOpening.from_bytes(await stream.receive())
        by = self._group.peer_ids.index(peer)
        num_members = len(self._parts)
        backup = backup_of(opening.part, num_members)
        fits = {
            "exchange": opening.part == self._me and not self._closed.is_set(),
            "keep": opening.part == by and backup == self._me,
            "result": opening.part not in (by, self._me) and backup == self._me,
            "slices": opening.part not in (by, self._me) and backup == by,
        }
        is_spare = opening.kind != "exchange" and num_members < MIN_MEMBERS
        if opening.part >= num_members or is_spare or not fits[opening.kind] or (peer, opening.kind) in self._attended:
            raise PeerViolation(f"a second stream, or a wrong one, to {opening.kind} one part", peer_id=peer)
        self._attended.add((peer, opening.kind))
        part = self._parts[opening.part]
        match opening.kind:
            case "exchange":
                await self._serve_owner(peer, stream)
            case "keep":
                await self._keep(part, stream)
            case "result":
                self._stand_in_for(part)
                await self._send_result(stream, part, opening.frame)
            case "slices":
                await self._send_slices(stream, part, opening.frame)

    async def _serve_owner(self, peer: str, stream: Stream) -> None:
        future = self._stream_of(peer)
        if not future.done():
            future.set_result(stream)
        try:
            await self._inboxes[peer].fill(stream)
            await self._closed.wait()
        finally:
            # a stream is its handler's: nobody may use it after this
            if delivering := self._delivering.get(peer):
                delivering.cancel()

    async def _keep(self, part: PartResult, stream: Stream) -> None:
        for index in range(len(part.frames)):
            try:
                data = await stream.receive()
            except EndOfStream:
                return
            if not part.keep(index, data):
                raise PeerViolation("a slice of a wrong size", peer_id=part.owner)
        await self._faults.reached("round.kept")

    # --- this member's own part --------------------------------------------------------------------------------------

    async def _own_part(self) -> None:
        """Reduce frame after frame."""
        part, surveyed = self._parts[self._me], deque[list[bytes]]()
        for frame in part.frames if self._owner.has_survey else ():
            surveyed.append(await self._slices(frame))
            await self._off_loop(self._owner.survey, surveyed[-1], num_values(frame))
        await self._off_loop(self._owner.decide)
        for index, frame in enumerate(part.frames):
            encoded = surveyed.popleft() if surveyed else await self._slices(frame)
            if index == 0:
                await self._faults.reached("round.reducing")
            data = await self._off_loop(self._owner.reduce, encoded, num_values(frame))
            if index == 0:
                await self._faults.reached("round.reduced")
            part.put(index, data)

    async def _slices(self, frame: slice) -> list[bytes]:
        return [await self._slice_of(member.peer_id, frame) for member in self._owner.contributors]

    async def _slice_of(self, peer: str, frame: slice) -> bytes:
        if peer == self._network.peer_id:
            return await self._encoded(frame)
        # half of what members wait for the result: the owner is to find out, and to say, who keeps all waiting
        limit_s = self._group.reduce_s / 2
        try:
            async with asyncio.timeout(limit_s):
                return await self._inboxes[peer].take()
        except TimeoutError:
            raise PeerError(f"it sent no slice within {limit_s:.0f} s", peer_id=peer) from None
        except SwarmError as error:
            raise _not_of_others(error, peer) from error

    async def _hand_out(self) -> None:
        """Give all others the result, and meanwhile the backup what it would need to make it."""
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self._leave_with_backup(), name="leave with backup")
            async with asyncio.TaskGroup() as deliveries:
                for part in self._parts:
                    if part.index != self._me:
                        delivering = deliveries.create_task(self._deliver(part.owner), name="deliver")
                        self._delivering[part.owner] = delivering
            keeping.cancel()

    async def _deliver(self, peer: str) -> None:
        """Hand `peer` the results of this member's part. That it cannot be had is `peer`'s loss alone."""
        try:
            stream = await self._stream_of(peer)
            await self._send_result(stream, self._parts[self._me], 0, phase="round.deliver")
            await stream.finish()
        except SwarmError as error:
            logger.warning("could not hand a result to %s: %s", peer[-6:], error)

    async def _leave_with_backup(self) -> None:
        part, num_members = self._parts[self._me], len(self._parts)
        if num_members < MIN_MEMBERS or self._delta_N is None:
            return
        backup = self._group.peer_ids[backup_of(self._me, num_members)]
        try:
            async with self._open(backup, ReduceOpening(kind="keep", part=self._me)) as stream:
                await self._send_slices(stream, part, 0)
                await stream.finish()
                await _read_out(stream)
        except SwarmError as error:
            logger.warning("%s cannot stand in for this member: %s", backup[-6:], error)

    # --- the parts of others -----------------------------------------------------------------------------------------

    async def _exchange(self, part: PartResult) -> None:
        """Send the owner this member's slice of its part, and have the result of it, or else of its backup."""
        patience_s = self._group.reduce_s / 4
        async with asyncio.TaskGroup() as tasks:
            failed: asyncio.Future[SwarmError] = asyncio.get_running_loop().create_future()
            talk = tasks.create_task(self._converse(part, failed), name="converse")
            while (error := await _trouble(part, talk, failed, patience_s)) is not None:
                if await self._had_from_backup(part, error):
                    break
                if failed.done():
                    await self._fail(failed.result())
                # it is there, and silent: the round's deadline ends that
                patience_s = math.inf
            talk.cancel()
        if self._standing_in and backup_of(part.index, len(self._parts)) == self._me:
            self._standing_in.cancel()

    async def _converse(self, part: PartResult, failed: asyncio.Future[SwarmError]) -> None:
        """`failed` hears what goes wrong; the stream stays open then."""

        async def tell(work: Coroutine[Any, Any, None]) -> None:
            try:
                await work
            except SwarmError as error:
                if not failed.done():
                    failed.set_result(error)
                await asyncio.get_running_loop().create_future()

        async def talk() -> None:
            opening = ReduceOpening(kind="exchange", part=part.index)
            with _blamed(part.owner):
                async with self._open(part.owner, opening) as stream, asyncio.TaskGroup() as tasks:
                    if self._delta_N is not None:
                        tasks.create_task(tell(self._send_all(stream, part)), name="send slices")
                    tasks.create_task(tell(self._take_result(stream, part, part.owner)), name="take result")

        await tell(talk())

    async def _send_all(self, stream: Stream, part: PartResult) -> None:
        await self._send_slices(stream, part, 0, phase="round.slice")
        with _blamed(part.owner):
            await stream.finish()

    async def _had_from_backup(self, part: PartResult, error: SwarmError) -> bool:
        """Whether the backup finishes what the owner has failed to do: if that is all that is wrong."""
        num_members = len(self._parts)
        is_owners = isinstance(error, PeerError) and error.peer_id == part.owner
        if not is_owners or isinstance(error, PeerViolation) or num_members < MIN_MEMBERS or self._lacks(part.owner):
            return False
        backup = backup_of(part.index, num_members)
        logger.warning("turning to its backup for the part of %s: %s", part.owner[-6:], error)
        try:
            async with asyncio.timeout(self._group.reduce_s / 2):
                if backup == self._me:
                    self._stand_in_for(part)
                    await part.reached(len(part.frames))
                else:
                    await self._have_result_of(self._group.peer_ids[backup], part)
        except TimeoutError:
            logger.warning("the backup is as silent")
        except SwarmError as failure:
            logger.warning("the backup cannot help: %s", failure)
        if part.complete and (delivering := self._delivering.get(part.owner)):
            delivering.cancel()
        return part.complete

    def _lacks(self, owner: str) -> bool:
        """Whether it is gone before its slices were here: without them this member's own part cannot be made."""
        own, contributes = self._parts[self._me], owner in [each.peer_id for each in self._owner.contributors]
        return (
            contributes and not self._inboxes[owner].is_filling and self._inboxes[owner].num_received < len(own.frames)
        )

    async def _have_result_of(self, backup: str, part: PartResult) -> None:
        opening = ReduceOpening(kind="result", part=part.index, frame=part.have)
        async with self._open(backup, opening) as stream:
            await self._take_result(stream, part, backup, opening.frame)

    def _stand_in_for(self, part: PartResult) -> None:
        """Make the rest of the part's result, of which this member is the backup."""
        if part.complete or self._standing_in is not None:
            return
        if self._tasks is None or self._closed.is_set():
            raise RoundError("the reduction is over")
        work = StandIn(
            self._open,
            self._group,
            self._network.peer_id,
            part,
            scheme=self._scheme,
            executor=self._executor,
            encoded=self._encoded,
        )

        async def stand_in() -> None:
            await self._faults.reached("round.stand_in")
            try:
                await work.run()
            except SwarmError as error:
                part.fail(error)

        self._standing_in = self._tasks.create_task(stand_in(), name="stand in")

    async def _take_result(self, stream: Stream, part: PartResult, peer: str, first: int = 0) -> None:
        for index in range(first, len(part.frames)):
            try:
                data = await stream.receive()
                # nobody but its sender is to blame for bytes that cannot be decoded
                await self._off_loop(self._codec.decode, data, num_values(part.frames[index]))
            except EndOfStream:
                raise PeerViolation("it sent too little of its result", peer_id=peer) from None
            except SwarmError as error:
                raise _not_of_others(error, peer) from error
            except CodecError as error:
                raise PeerViolation(f"it sent a bad result: {error}", peer_id=peer) from error
            part.put(index, data)

    # --- both ---------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open(self, peer: str, opening: ReduceOpening) -> AsyncIterator[Stream]:
        async with self._network.stream(peer, self._method, timeout_s=self._group.reduce_s) as stream:
            for data in (self._signed.data, opening.to_bytes()):
                await stream.send(data)
                self.bytes_sent += len(data)
            yield stream

    async def _send_slices(self, stream: Stream, part: PartResult, first: int, phase: str = "") -> None:
        for frame in part.frames[first:] if self._delta_N is not None else ():
            data = await self._encoded(frame)
            with _blamed(part.owner):
                await stream.send(data)
            self.bytes_sent += len(data)
            if phase:
                await self._faults.reached(phase)

    async def _send_result(self, stream: Stream, part: PartResult, first: int, phase: str = "") -> None:
        for index in range(first, len(part.frames)):
            await part.reached(index + 1)
            if phase and index == 0:
                await self._faults.reached(phase)
            data = part.frame(index)
            await stream.send(data)
            self.bytes_sent += len(data)

    async def _encoded(self, frame: slice) -> bytes:
        return await self._off_loop(self._encode, frame)

    def _encode(self, frame: slice) -> bytes:
        assert self._delta_N is not None
        try:
            if self._feedback is not None:
                return self._feedback.encode(self._delta_N[frame], frame.start)
            return self._codec.encode(self._delta_N[frame])
        except CodecError as error:
            raise RoundError(f"this member's contribution cannot be encoded: {error}") from error

    def _stream_of(self, peer: str) -> asyncio.Future[Stream]:
        if peer not in self._streams:
            self._streams[peer] = asyncio.get_running_loop().create_future()
        return self._streams[peer]

    async def _hold(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`. If it fails, report that and keep everything open until cancelled."""
        try:
            await work
        except SwarmError as error:
            await self._fail(error)

    async def _fail(self, error: SwarmError) -> None:
        if not self._failed:
            self._failed = True
            self._on_failure(error)
        await asyncio.get_running_loop().create_future()

    async def _off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


async def _trouble(
    part: PartResult, talk: asyncio.Task[None], failed: asyncio.Future[SwarmError], patience_s: float
) -> SwarmError | None:
    """What is wrong with the conversation; None once the part is there. Its owner may be silent for `patience_s`."""
    timeout_s = None if math.isinf(patience_s) else patience_s
    either: set[asyncio.Future[Any]] = {talk, failed}
    while not part.complete or not talk.done():
        have = part.have
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            return failed.result()
        if not talk.done() and part.have == have:
            return PeerTimeout(f"it has sent nothing for {patience_s:.0f} s", peer_id=part.owner)
    return None


async def _read_out(stream: Stream) -> None:
    """Until the other side has taken all and ended."""
    with suppress(EndOfStream):
        while True:
            await stream.receive()


@contextmanager
def _blamed(peer: str) -> Iterator[None]:
    """What `peer`'s stream raises inside is `peer`'s."""
    try:
        yield
    except PeerRefused as error:
        raise PeerError(f"it refuses its part: {error}", peer_id=peer) from error
    except SwarmError as error:
        raise _not_of_others(error, peer) from error


def _not_of_others(error: SwarmError, peer: str) -> SwarmError:
    """`error`, as it came over `peer`'s stream: that it blames another one proves nothing about the other.

    One that blames nobody is `peer`'s own, or it could give up one attempt after the other.
    """
    if isinstance(error, PeerError) and error.peer_id == peer:
        return error
    return PeerError(f"it gave up: {error.message}", peer_id=peer)
