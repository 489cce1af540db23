"""The butterfly all-reduce of one vector among the members of a signed group: the data plane of a round.

Each member owns one part of the vector. It opens one stream to each other owner, sends its slice of that part, encoded
frame by frame, and receives the part's result (`Exchange`). The owner reads the members' frames in the group's order,
so the result does not depend on which member was quick, aggregates them, encodes the result once, and sends these bytes
to all members (`part_reduction`). Memory beyond the vector is the encoded result, a few frames for each member, and the
received slices of the own part, with which a member answers its auditors (`audit`). If an owner dies or falls silent
after it has sent its slices, its backup finishes its part.

A frame of wrong size or format, or with values that are not finite, ends the reduction with an error that names its
sender. After a failure nothing is torn down until the caller cancels: otherwise other members would see streams break,
and blame this member before they hear the reason.

`Butterfly.run` owns the tasks of one reduction. Shapes: N values of the vector, F values of a frame.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from swarm_compression.codec import Data
from swarm_protocol.envelope import OutOfTime
from swarm_protocol.errors import PeerError, PeerTimeout, PeerViolation, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.reduction_messages import OpeningKind, ReduceOpening

from swarm.network.interface import Stream
from swarm.training.allreduce.backup_owner import MAX_BACKUPS, PartBackup
from swarm.training.allreduce.committed_slices import MadePart, proved, show_path
from swarm.training.allreduce.part_reduction import PartOwner
from swarm.training.allreduce.part_streams import RESULTS_SHARE, PartStreams, blamed, silence_of
from swarm.training.allreduce.parts import MIN_AHEAD_FRAMES, CaughtLying, PartResult, backup_peer
from swarm.training.allreduce.peer_connections import QUIET_S, SILENT_S

logger = logging.getLogger(__name__)

MAX_AUDITS = 4
"""Number of times that one member may audit a part. It audits again if it has got the parts of another outcome in the
same attempt."""
AHEAD_FRAMES = 9
"""Slices that a member has in flight to all owners together: 0.9 MiB of int8."""


class Butterfly:
    """One member's side of one reduction, over its `streams`."""

    def __init__(
        self,
        streams: PartStreams,
        on_failure: Callable[[SwarmError], Awaitable[None]],
        answer_audit: Callable[[int, Stream], Awaitable[None]],
    ) -> None:
        """Set up this member's side. The handler of `Methods.reduce` passes each stream to `accept` of the butterfly of
        the same group. `answer_audit` serves an auditor of a part that this member has made.

        `on_failure` is called with the first failure, with every later CaughtLying, and with an UndecodableSlice whose
        proof the end of the attempt cut off. PeerError and PeerViolation name the peer at fault, and CaughtLying proves
        what it did.
        """
        self.streams = streams
        self._group = group = streams.group
        self._me = group.peer_ids.index(streams.me)
        self._parts = [PartResult(group, index, streams.scheme.codec) for index in range(len(group.members))]
        self.own = PartOwner(self.streams, self._parts[self._me])
        self._on_failure = on_failure
        self._answer_audit = answer_audit
        self._accepted = Counter[tuple[str, str, int]]()
        # the part before this member's own is the one whose backup it is, if the group has backups
        self.backup = PartBackup(self.streams, self._parts[self._me - 1], self._report, on_failure)
        self._parts_from_backup: set[int] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._failed = False

    def drop(self) -> None:
        """Release the contribution and the parts, since the step is over. Streams that are still served then fail.

        Exceptions that ended streams refer to this object, so without this only a garbage collection would free the
        memory.
        """
        self.streams.drop_contribution()
        for part in self._parts:
            part.drop()
        self.own.made.drop()
        self.backup.drop()

    def data_made(self, part: int) -> Data:
        """Return the encoded result of `part` as this member has made it. Valid after `made`."""
        return self.backup.done.data if self.backup.done and part != self._me else self._parts[part].data

    def differs_from(self, parts: Sequence[Data]) -> bool:
        """Return whether one of `parts` is not the result that this member has of it, as far as it has whole ones.
        Blocks."""
        return any(mine.complete and mine.data != given for mine, given in zip(self._parts, parts, strict=True))

    def is_from_backup(self, part: int) -> bool:
        """Return whether the result of `part` came from its backup, or this member made it as the backup."""
        is_made_here = self.backup.done is not None and part == self.backup.part.index
        return part in self._parts_from_backup or is_made_here

    async def made(self, part: int) -> MadePart:
        """Return the slices from which this member has made `part`, as its owner or backup. Waits until the part is
        complete, and checks that all slices are those that their senders committed to.

        Raises PeerViolation, which names a member that sent other slices, and RoundError or PeerError if this member
        has not made the part.
        """
        result = self._parts[part]
        if part == self._me:
            made = self.own.made
            await result.wait_for_frames(len(result.frames))
        else:
            # if the backup has not begun, the owner failed after it had sent its whole part
            made = (await self.backup.make()).made
        await self.streams.off_loop(made.check)
        return made

    async def run(self) -> tuple[Data, ...]:
        """Return the encoded results of all parts, once this member has also sent its own to all others. After a
        failure, run until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                # if a vector has fewer leaves than there are members, some members own nothing
                if self._parts[self._me].frames:
                    self._tasks.create_task(self._reduce_own(), name="own part")
                    self._tasks.create_task(self.own.hand_out(), name="hand out")
                for part in self._parts:
                    if part.index != self._me and part.frames:
                        self._tasks.create_task(self._exchange(part), name=f"exchange with {short_id(part.owner)}")
        finally:
            self.own.close()
        return tuple(part.data for part in self._parts)

    async def accept(self, peer: str, opening: ReduceOpening, stream: Stream) -> None:
        """Serve a stream of `peer` to this group, whose opening has been read.

        A stream to this member's own part stays open until the reduction has ended. Backups, and members that ask them,
        are served after that, too.
        """
        if peer not in self._group.peer_ids:
            raise PeerViolation("a stream from outside its group", peer_id=peer)
        self._accepted[peer, opening.kind, opening.part] += 1
        most = {"audit": MAX_AUDITS, "slices": MAX_BACKUPS}.get(opening.kind, 1)
        if not self._fits(peer, opening) or self._accepted[peer, opening.kind, opening.part] > most:
            raise PeerViolation(f"an unexpected or repeated {opening.kind} stream for this part", peer_id=peer)
        part = self._parts[opening.part]
        match opening.kind:
            case "exchange":
                await self.own.serve(peer, opening, stream)
            case "keep":
                await self.backup.keep(opening, stream)
            case "result":
                self.start_backup()
                await self.streams.send_result(stream, part, opening.frame)
            case "slices":
                await stream.send(self.streams.slices_opening("slices", part.index).to_bytes())
                await self.streams.send_slices(stream, part, opening.frame)
            case "audit":
                await self._answer_audit(opening.part, stream)
            case "proof":
                await show_path(self.streams, part.index, stream)

    def _fits(self, peer: str, opening: ReduceOpening) -> bool:
        """Return whether `peer` may open such a stream to this member."""
        if opening.part >= len(self._parts):
            return False
        owner, backup = self._group.peer_ids[opening.part], backup_peer(self._group, opening.part)
        is_own, is_third = opening.part == self._me, owner not in (peer, self.streams.me)
        asks_backup = is_third and backup == self.streams.me
        fits: dict[OpeningKind, bool] = {
            "exchange": is_own and not self.own.is_closed,
            "keep": owner == peer and backup == self.streams.me,
            "result": asks_backup,
            "slices": is_third and backup == peer,
            "audit": is_own or asks_backup,
            "proof": peer in (owner, backup),
        }
        return fits[opening.kind]

    async def _exchange(self, part: PartResult) -> None:
        is_owners = await Exchange(self, part).run()
        if not is_owners:
            self._parts_from_backup.add(part.index)
            self.own.stop_delivery(part.owner)
        elif part is self.backup.part:
            self.backup.stop()

    def start_backup(self) -> None:
        """Start to make the part whose backup this member is. Raises RoundError if the reduction is over."""
        self.backup.start(None if self.own.is_closed else self._tasks)

    async def _reduce_own(self) -> None:
        try:
            await self.own.reduce()
        except SwarmError as error:
            await self.fail(await proved(self.streams, self._me, error, on_cut_off=self._on_failure))

    async def fail(self, error: SwarmError) -> None:
        """Report the first failure, and keep everything open until cancelled."""
        await self._report(error)
        await _until_cancelled()

    async def _report(self, error: SwarmError) -> None:
        # a proof counts even after another failure has ended the attempt
        if not self._failed or isinstance(error, CaughtLying):
            self._failed = True
            await self._on_failure(error)


async def _until_cancelled() -> None:
    await asyncio.get_running_loop().create_future()


class Exchange:
    """Sends this member's slices of `part`, which another member owns, and gets the part's result.

    If the owner fails after its own slices have arrived at its backup, the backup sends the result. Slices are sent
    only a few frames ahead of the result, so that members that wait for each other hold few frames, whatever the
    vector's size.
    """

    def __init__(self, butterfly: Butterfly, part: PartResult) -> None:
        self._butterfly = butterfly
        self._streams = butterfly.streams
        self._group = butterfly.streams.group
        self._part = part

    @property
    def _left_s(self) -> float:
        return self._streams.left_s(RESULTS_SHARE)

    async def run(self) -> bool:
        """Exchange until the part is complete. Return whether its owner has sent it."""
        # results wait for the slowest member's slices, and a part may have a single frame; silence must be found sooner
        patience_s = max(self._group.reduce_s / 2, QUIET_S + SILENT_S + QUIET_S / 2)
        async with asyncio.TaskGroup() as tasks:
            failed: asyncio.Future[SwarmError] = asyncio.get_running_loop().create_future()
            talk = tasks.create_task(self._converse(failed), name="converse")
            # this also runs while the backup is asked, which cannot help if the owner fell silent before its slices
            # were there
            silent = tasks.create_task(self._streams.until_silent(self._part.owner), name="until silent")
            has_asked = False
            while (error := await self._trouble(talk, failed, silent, patience_s)) is not None:
                if not has_asked and await self._had_from_backup(error):
                    break
                has_asked = True
                if failed.done() or not isinstance(error, _Withheld) or self._left_s <= 0:
                    await self._butterfly.fail(failed.result() if failed.done() else error)
                # the owner is there and sends nothing: it may itself wait for slices, whose sender it names in time
                patience_s = math.inf
            talk.cancel()
            silent.cancel()
        return error is None

    async def _trouble(
        self,
        talk: asyncio.Task[None],
        failed: asyncio.Future[SwarmError],
        silent: asyncio.Task[None],
        patience_s: float,
    ) -> SwarmError | None:
        """Wait until the part is complete and return None, or return what is wrong with the owner. The owner may send
        nothing for `patience_s`, and only while it answers calls and the time for results lasts."""
        part, loop = self._part, asyncio.get_running_loop()
        have, since = part.have, loop.time()
        while not part.complete or not talk.done():
            either, left_s = {each for each in (talk, failed, silent) if not each.done()}, self._left_s
            timeout_s = max(0.0, min(QUIET_S, patience_s, left_s))
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                return failed.result()
            if silent.done():
                return silence_of(part.owner)
            if self._left_s <= 0:
                return _Withheld("its result is not complete in time", peer_id=part.owner)
            if part.have > have or talk.done():
                have, since = part.have, loop.time()
            elif loop.time() - max(since, self._streams.heard_at[part.owner]) >= patience_s:
                return _Withheld(f"it has sent nothing for {patience_s:.0f} s", peer_id=part.owner)
        return None

    async def _converse(self, failed: asyncio.Future[SwarmError]) -> None:
        """Send the slices and take the result. After an error, which is set on `failed`, the stream stays open."""

        async def guard(work: Coroutine[Any, Any, None]) -> None:
            try:
                await work
            except SwarmError as error:
                if not failed.done():
                    failed.set_result(error)
                await _until_cancelled()

        async def talk() -> None:
            part = self._part
            opening = self._streams.slices_opening("exchange", part.index)
            with blamed(part.owner):
                async with self._streams.open(part.owner, opening) as stream, asyncio.TaskGroup() as tasks:
                    if self._streams.contributes:
                        tasks.create_task(guard(self._send_slices(stream)), name="send slices")
                    take_result = self._streams.take_result(stream, part, part.owner)
                    tasks.create_task(guard(take_result), name="take result")

        await guard(talk())

    async def _send_slices(self, stream: Stream) -> None:
        if self._streams.queued_s(self._part.owner) > QUIET_S:
            # otherwise the replies on streams that the owner opens would wait behind all slices that arrive here
            await self._butterfly.own.until_opened_by(self._part.owner)
        ahead = max(MIN_AHEAD_FRAMES, AHEAD_FRAMES // (len(self._group.members) - 1))
        await self._streams.send_slices(stream, self._part, ahead=ahead, phase="round.slice")
        with blamed(self._part.owner):
            await stream.finish()

    async def _had_from_backup(self, error: SwarmError) -> bool:
        """Get the rest of the part from its backup, if `error` is the owner's failure and no protocol violation. Return
        whether that completed the part."""
        part, backup = self._part, backup_peer(self._group, self._part.index)
        is_owners = isinstance(error, PeerError) and error.peer_id == part.owner
        # a wrong clock is no lie
        is_worse = isinstance(error, PeerViolation) and not isinstance(error, OutOfTime)
        if not is_owners or is_worse or backup is None or self._butterfly.own.lacks(part.owner):
            return False
        logger.warning("turning to its backup for the part of %s: %s", short_id(part.owner), error)
        try:
            async with asyncio.timeout(min(self._group.reduce_s / 2, self._left_s)):
                if backup == self._streams.me:
                    self._butterfly.start_backup()
                    await part.wait_for_frames(len(part.frames))
                else:
                    opening = self._streams.opening("result", part.index, frame=part.have)
                    async with self._streams.open(backup, opening) as stream:
                        await self._streams.take_result(stream, part, backup, opening.frame)
        except TimeoutError:
            logger.warning("the backup is as silent")
        except SwarmError as failure:
            logger.warning("the backup cannot help: %s", failure)
        return part.complete


class _Withheld(PeerTimeout):
    """The owner is there, and has sent nothing of its result for too long."""
