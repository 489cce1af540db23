"""Does the work of a part's owner at the owner's backup, if the owner fails.

A part's backup is the owner of the next part. If the owner fails, the backup does its work in the same attempt. The
owner sends its own slices to the backup at the beginning; the backup asks the other members for theirs. Slices, order
and codec are the same, so the result is byte for byte the owner's, and members continue after the frames that they
already have. If the owner dies before all its slices have arrived, nobody can reduce its part, and the attempt fails.

`butterfly` owns the task group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from swarm_compression.codec import Data
from swarm_protocol.errors import PeerUnreachable, PeerViolation, RoundError, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.reduction_messages import ReduceOpening

from swarm.network.interface import EndOfStream, Stream
from swarm.training.allreduce.committed_slices import MadePart, proved
from swarm.training.allreduce.part_reduction import PartReducer
from swarm.training.allreduce.part_streams import FrameInbox, PartStreams, blamed
from swarm.training.allreduce.parts import PartResult, UndecodableSlice

logger = logging.getLogger(__name__)


MAX_BACKUPS = 4
"""Number of times that a backup may begin to make a part, and so ask each member for its slices. It may begin again
because the peer that waited for the part may leave."""


class PartBackup:
    """Keeps the slices of the owner of `part`, whose backup this member is, and makes the part if the owner fails.

    `report` is called with the error if a slice cannot be decoded, since the caller that waits for the part knows only
    of its owner's failure. `on_cut_off` is called as `committed_slices.proved` does.
    """

    def __init__(
        self,
        streams: PartStreams,
        part: PartResult,
        report: Callable[[SwarmError], Awaitable[None]],
        on_cut_off: Callable[[SwarmError], Awaitable[None]],
    ) -> None:
        self.part = part
        self.done: BackupOwner | None = None
        """The finished work, or None."""
        self._streams = streams
        self._report = report
        self._on_cut_off = on_cut_off
        self._num_begun = 0
        self._making = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def keep(self, opening: ReduceOpening, stream: Stream) -> None:
        """Keep the slices that the part's owner sends."""
        self.part.kept_proof = opening.proof
        for _ in self.part.frames:
            try:
                data = await stream.receive()
            except EndOfStream:
                return
            if not self.part.keep(data):
                raise PeerViolation("a slice of a wrong size", peer_id=self.part.owner)
        await self._streams.failpoints.reached("round.kept")

    async def make(self) -> BackupOwner:
        """Make the part, once for all callers. Raises PeerError, which names the peer whose fault it is, and
        RoundError."""
        async with self._making:
            if self.done is not None:
                return self.done
            if self._num_begun == MAX_BACKUPS:
                raise RoundError("this member began too often to make the part as its backup")
            self._num_begun += 1
            owner = BackupOwner(self._streams, self.part)
            try:
                await owner.run()
            except UndecodableSlice as error:
                failure = await proved(self._streams, self.part.index, error, on_cut_off=self._on_cut_off)
                await self._report(failure)
                raise failure from error.__cause__
            self.done = owner
            return owner

    def start(self, tasks: asyncio.TaskGroup | None) -> None:
        """Start to make the part, unless that has begun or the part is complete. Raises RoundError if `tasks` is None,
        as the reduction is over."""
        if self.part.complete or self._task is not None:
            return
        if tasks is None:
            raise RoundError("the reduction is over")
        self._task = tasks.create_task(self._run(), name="backup owner")

    def stop(self) -> None:
        """Stop the work that `start` began, because the owner has sent the whole part."""
        if self._task is not None:
            self._task.cancel()

    def drop(self) -> None:
        if self.done is not None:
            self.done.made.drop()

    async def _run(self) -> None:
        await self._streams.failpoints.reached("round.backup")
        try:
            owner = await self.make()
        except SwarmError as error:
            self.part.fail(error)
        else:
            if not owner.agrees:
                self.part.fail(RoundError("the part's owner and its backup give different results"))


class BackupOwner:
    """Reduces `part`, whose owner has failed, from its first frame on. `made` then holds all slices, as an owner has
    them. If frames that the owner sent before differ, `part` keeps the owner's frames, and `data` is the result that
    follows from the slices: with it, auditors can convict the owner of what it has signed."""

    def __init__(self, streams: PartStreams, part: PartResult) -> None:
        self.made = MadePart(streams.group, part, streams.scheme.codec)
        self._streams = streams
        self._reducer = PartReducer.of_group(streams.scheme, streams.group)
        self._part = part
        self._limit_s = streams.group.reduce_s / 2
        self._inboxes: dict[str, FrameInbox] = {}
        self._other: bytearray | None = None

    @property
    def agrees(self) -> bool:
        """Return whether all frames that the owner sent follow from the slices."""
        return self._other is None

    @property
    def data(self) -> Data:
        """The encoded result that follows from the slices, as far as it is made."""
        return self._part.data if self._other is None else self._other

    async def run(self) -> None:
        """Make the part. Raises PeerError, which names the peer whose fault it is, and RoundError."""
        streams, part, failure = self._streams, self._part, None
        self.made.commit(streams.me, streams.own_proof(part.index))
        self.made.commit(part.owner, part.kept_proof)
        peers = [member.peer_id for member in self._reducer.contributors]
        others = [peer for peer in peers if peer not in (streams.me, part.owner)]
        self._inboxes = {peer: streams.inbox(peer) for peer in others}
        async with asyncio.TaskGroup() as tasks:
            pulls = [tasks.create_task(self._pull(peer)) for peer in others]
            try:
                for index in range(len(part.frames)):
                    await self._reduce_frame(index, [await self._kept_slice(peer, index) for peer in peers])
            except SwarmError as error:
                failure = error
            for pull in pulls:
                pull.cancel()
        if failure is not None:
            raise failure

    async def _pull(self, peer: str) -> None:
        try:
            async with self._streams.open(peer, self._streams.opening("slices", self._part.index)) as stream:
                self.made.commit(peer, ReduceOpening.from_bytes(await stream.receive()).proof)
                await self._inboxes[peer].fill(stream)
        except SwarmError as error:
            self._inboxes[peer].fail(error)

    async def _reduce_frame(self, index: int, encoded: Sequence[Data]) -> None:
        frame = self._part.frames[index]
        buffer = self._streams.buffer(frame)
        await self._streams.off_loop(self._reducer.reduce, encoded, frame, buffer)
        if self._other is None:
            try:
                self._part.put(index, buffer)
                return
            except RoundError as error:
                logger.warning("in the part of %s, %s", short_id(self._part.owner), error.message)
                self._other = bytearray().join(self._part.frame(before) for before in range(index))
        self._other += buffer

    async def _kept_slice(self, peer: str, index: int) -> Data:
        data = await self._slice(peer, index)
        self.made.keep(peer, data)
        return data

    async def _slice(self, peer: str, index: int) -> bytes:
        if peer == self._streams.me:
            return bytes(await self._streams.encoded(self._part.frames[index]))
        try:
            if peer != self._part.owner:
                with blamed(peer):
                    return await self._streams.expect(peer, self._inboxes[peer], self._limit_s)
            async with asyncio.timeout(self._limit_s):
                await self._streams.while_not_silent(peer, self._part.wait_for_kept(index + 1))
        except TimeoutError:
            raise PeerUnreachable("its slices are not all there", peer_id=peer) from None
        return self._part.kept[index]
