"""The exchange with the owner of another part: this member's slices of it for the part's result.

A part whose owner fails after its own slices were here comes from its backup. Slices leave only so far ahead of the
result that all who wait for each other hold few frames, whatever the vector's size.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

from swarm_protocol.errors import PeerError, PeerTimeout, PeerViolation, SwarmError
from swarm_protocol.training_messages import ReduceOpening

from swarm.network.interface import Stream
from swarm.training.allreduce.backup_owner import MIN_MEMBERS, backup_of
from swarm.training.allreduce.frame_inbox import MIN_AHEAD_FRAMES
from swarm.training.allreduce.part_result import PartResult
from swarm.training.allreduce.part_streams import PartStreams, blamed, silence_of
from swarm.training.allreduce.peer_connections import QUIET_S

logger = logging.getLogger(__name__)

AHEAD_FRAMES = 9
"""How many slices a member has on its way to all owners together: 0.9 MiB of int8."""


class Exchange:
    """For `part`. `lacks(peer)`: its slices of this member's own part will never come. `stand_in` makes the part here,
    at its backup; it raises RoundError. `fail` reports an error, and comes back only by being cancelled."""

    def __init__(
        self,
        streams: PartStreams,
        part: PartResult,
        *,
        lacks: Callable[[str], bool],
        stand_in: Callable[[PartResult], None],
        fail: Callable[[SwarmError], Coroutine[Any, Any, None]],
    ) -> None:
        self._streams = streams
        self._group = streams.group
        self._part = part
        self._lacks = lacks
        self._stand_in = stand_in
        self._fail = fail

    async def run(self) -> bool:
        """Until the part is complete; whether its owner has made it."""
        # where owners survey whole parts first, results follow what the slowest member sends
        patience_s = self._group.reduce_s / (2 if self._surveys else 4)
        async with asyncio.TaskGroup() as tasks:
            failed: asyncio.Future[SwarmError] = asyncio.get_running_loop().create_future()
            talk = tasks.create_task(self._converse(failed), name="converse")
            while (error := await self._trouble(talk, failed, patience_s)) is not None:
                if await self._had_from_backup(error):
                    break
                if failed.done() or not isinstance(error, _Withheld):
                    await self._fail(failed.result() if failed.done() else error)
                # it is there, and sends nothing: the round's deadline ends that
                patience_s = math.inf
            talk.cancel()
        return error is None

    @property
    def _surveys(self) -> bool:
        """Whether an owner needs all slices before there is any result."""
        return self._streams.scheme.aggregator.survey != "nothing"

    async def _trouble(
        self, talk: asyncio.Task[None], failed: asyncio.Future[SwarmError], patience_s: float
    ) -> SwarmError | None:
        """What is wrong with the conversation; None once the part is there. The owner may send nothing for
        `patience_s`, and only while it answers calls."""
        part, loop = self._part, asyncio.get_running_loop()
        have, since = part.have, loop.time()
        silent = asyncio.create_task(self._streams.until_silent(part.owner))
        either: set[asyncio.Future[Any]] = {talk, failed, silent}
        try:
            while not part.complete or not talk.done():
                await asyncio.wait(either, timeout=min(QUIET_S, patience_s), return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    return failed.result()
                if silent.done():
                    return silence_of(part.owner)
                if part.have > have or talk.done():
                    have, since = part.have, loop.time()
                elif loop.time() - since >= patience_s:
                    return _Withheld(f"it has sent nothing for {patience_s:.0f} s", peer_id=part.owner)
        finally:
            silent.cancel()
        return None

    async def _converse(self, failed: asyncio.Future[SwarmError]) -> None:
        """`failed` hears what goes wrong; the stream stays open then."""

        async def tell(work: Coroutine[Any, Any, None]) -> None:
            try:
                await work
            except SwarmError as error:
                if not failed.done():
                    failed.set_result(error)
                await asyncio.get_running_loop().create_future()

        async def talk() -> None:
            part = self._part
            opening = ReduceOpening(kind="exchange", part=part.index)
            with blamed(part.owner):
                async with self._streams.open(part.owner, opening) as stream, asyncio.TaskGroup() as tasks:
                    if self._streams.contributes:
                        tasks.create_task(tell(self._send_slices(stream)), name="send slices")
                    take_result = self._streams.take_result(stream, part, part.owner)
                    tasks.create_task(tell(take_result), name="take result")

        await tell(talk())

    async def _send_slices(self, stream: Stream) -> None:
        ahead = max(MIN_AHEAD_FRAMES, AHEAD_FRAMES // (len(self._group.members) - 1))
        await self._streams.send_slices(stream, self._part, ahead=None if self._surveys else ahead, phase="round.slice")
        with blamed(self._part.owner):
            await stream.finish()

    async def _had_from_backup(self, error: SwarmError) -> bool:
        """Whether the backup finishes what the owner has failed to do: if that is all that is wrong."""
        part, num_members = self._part, len(self._group.members)
        is_owners = isinstance(error, PeerError) and error.peer_id == part.owner
        if not is_owners or isinstance(error, PeerViolation) or num_members < MIN_MEMBERS or self._lacks(part.owner):
            return False
        backup = self._group.peer_ids[backup_of(part.index, num_members)]
        logger.warning("turning to its backup for the part of %s: %s", part.owner[-6:], error)
        try:
            async with asyncio.timeout(self._group.reduce_s / 2):
                if backup == self._streams.me:
                    self._stand_in(part)
                    await part.reached(len(part.frames))
                else:
                    opening = ReduceOpening(kind="result", part=part.index, frame=part.have)
                    async with self._streams.open(backup, opening) as stream:
                        await self._streams.take_result(stream, part, backup, opening.frame)
        except TimeoutError:
            logger.warning("the backup is as silent")
        except SwarmError as failure:
            logger.warning("the backup cannot help: %s", failure)
        return part.complete


class _Withheld(PeerTimeout):
    """The owner is there, and has sent nothing of its result for too long."""
