"""The exchange with the owner of another part: this member's slices of the part for the part's result.

If the owner fails after its own slices have arrived at its backup, the backup gives the result. Slices are sent only so
far ahead of the result that members that wait for each other hold few frames, whatever the vector's size.
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
from swarm.training.allreduce.part_streams import PartStreams, blamed, silence_of
from swarm.training.allreduce.parts import MIN_AHEAD_FRAMES, MIN_MEMBERS_FOR_BACKUP, PartResult, backup_of
from swarm.training.allreduce.peer_connections import QUIET_S

logger = logging.getLogger(__name__)

AHEAD_FRAMES = 9
"""Slices that a member has on their way to all owners together: 0.9 MiB of int8."""


class Exchange:
    """Gets the result of `part`, which another member owns.

    `lacks(peer)` tells whether `peer`'s slices of this member's own part will never arrive. `back_up` starts the
    reduction of the part here, at its backup; it raises RoundError. `fail` reports an error, and returns only by being
    cancelled.
    """

    def __init__(
        self,
        streams: PartStreams,
        part: PartResult,
        *,
        lacks: Callable[[str], bool],
        back_up: Callable[[PartResult], None],
        fail: Callable[[SwarmError], Coroutine[Any, Any, None]],
    ) -> None:
        self._streams = streams
        self._group = streams.group
        self._part = part
        self._lacks = lacks
        self._back_up = back_up
        self._fail = fail
        # whether the owner needs all slices before there is any result
        self._surveys = streams.scheme.aggregator.survey != "nothing"

    async def run(self) -> bool:
        """Return once the part is complete: whether its owner has given it."""
        # where owners survey whole parts first, results wait for the slowest member's slices
        patience_s = self._group.reduce_s / (2 if self._surveys else 4)
        async with asyncio.TaskGroup() as tasks:
            failed: asyncio.Future[SwarmError] = asyncio.get_running_loop().create_future()
            talk = tasks.create_task(self._converse(failed), name="converse")
            while (error := await self._trouble(talk, failed, patience_s)) is not None:
                if await self._had_from_backup(error):
                    break
                if failed.done() or not isinstance(error, _Withheld):
                    await self._fail(failed.result() if failed.done() else error)
                # the owner is there, and sends nothing: the round's deadline ends that
                patience_s = math.inf
            talk.cancel()
        return error is None

    async def _trouble(
        self, talk: asyncio.Task[None], failed: asyncio.Future[SwarmError], patience_s: float
    ) -> SwarmError | None:
        """Wait for the part, and return None, or for what is wrong with the owner. The owner may send nothing for
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
        """Send the slices and take the result. After an error, which is set on `failed`, the stream stays open."""

        async def guard(work: Coroutine[Any, Any, None]) -> None:
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
                        tasks.create_task(guard(self._send_slices(stream)), name="send slices")
                    take_result = self._streams.take_result(stream, part, part.owner)
                    tasks.create_task(guard(take_result), name="take result")

        await guard(talk())

    async def _send_slices(self, stream: Stream) -> None:
        ahead = max(MIN_AHEAD_FRAMES, AHEAD_FRAMES // (len(self._group.members) - 1))
        await self._streams.send_slices(stream, self._part, ahead=None if self._surveys else ahead, phase="round.slice")
        with blamed(self._part.owner):
            await stream.finish()

    async def _had_from_backup(self, error: SwarmError) -> bool:
        """Get the rest of the part from its backup, if `error` is the owner's failure and nothing worse. Return whether
        that completed the part."""
        part, num_members = self._part, len(self._group.members)
        is_owners = isinstance(error, PeerError) and error.peer_id == part.owner
        has_backup = num_members >= MIN_MEMBERS_FOR_BACKUP
        if not is_owners or isinstance(error, PeerViolation) or not has_backup or self._lacks(part.owner):
            return False
        backup = self._group.peer_ids[backup_of(part.index, num_members)]
        logger.warning("turning to its backup for the part of %s: %s", part.owner[-6:], error)
        try:
            async with asyncio.timeout(self._group.reduce_s / 2):
                if backup == self._streams.me:
                    self._back_up(part)
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
