"""What a part's backup does when the part's owner fails: the owner's work, in the same attempt, with the same bytes.

The backup of a part is the owner of the next one. The owner has sent it its own slices at the beginning; those of the
other members it asks for, from the first frame on whose result it lacks itself. Slices, order and codec are the same,
so the result is the owner's, byte for byte: whoever has part of that goes on behind it. If the owner died before all
its slices were here, nobody can make its part, and the attempt fails. So it does under an aggregator that surveys the
whole part, once results have come and taken the place of the slices that it would survey.

`butterfly` owns the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager

from swarm_protocol.errors import PeerUnreachable, RoundError, SwarmError
from swarm_protocol.training_messages import Contribution, Group, ReduceOpening

from swarm.network.interface import Stream
from swarm.training.inbox import Inbox
from swarm.training.part_owner import PartOwner, Scheme
from swarm.training.part_result import PartResult
from swarm.training.parts import num_values

MIN_MEMBERS = 3
"""Of two members, none can do without the other."""


def backup_of(part: int, num_members: int) -> int:
    """The member, by rank, who stands in for the owner of `part`."""
    return (part + 1) % num_members


Open = Callable[[str, ReduceOpening], AbstractAsyncContextManager[Stream]]


class StandIn:
    """For the owner of `part`. `encoded` gives the slice that the member `me` contributes to a frame."""

    def __init__(
        self,
        open_stream: Open,
        group: Group,
        me: str,
        part: PartResult,
        *,
        scheme: Scheme,
        executor: Executor,
        encoded: Callable[[slice], Awaitable[bytes]],
    ) -> None:
        self._open = open_stream
        self._me = me
        self._work = PartOwner(scheme, group)
        self._part = part
        self._executor = executor
        self._encoded = encoded
        self._limit_s = group.reduce_s / 2

    async def run(self) -> None:
        """Until the part is complete. Raises PeerError with the name of whoever lets it down, and RoundError."""
        part, failure = self._part, None
        if self._work.has_survey and part.have:
            raise RoundError("the owner has failed in the midst of its results, which its backup cannot make")
        others = [member.peer_id for member in self._work.contributors if member.peer_id not in (self._me, part.owner)]
        inboxes, first = {peer: Inbox(peer) for peer in others}, part.have
        async with asyncio.TaskGroup() as tasks:
            pulls = [tasks.create_task(self._pull(peer, first, inbox)) for peer, inbox in inboxes.items()]
            try:
                await self._reduce(first, inboxes)
            except SwarmError as error:
                failure = error
            for pull in pulls:
                pull.cancel()
        if failure is not None:
            raise failure

    async def _pull(self, peer: str, first: int, inbox: Inbox) -> None:
        try:
            async with self._open(peer, ReduceOpening(kind="slices", part=self._part.index, frame=first)) as stream:
                await inbox.fill(stream)
        except SwarmError as error:
            inbox.fail(error)

    async def _reduce(self, first: int, inboxes: dict[str, Inbox]) -> None:
        loop, part, work = asyncio.get_running_loop(), self._part, self._work
        surveyed = []
        for index in range(first, len(part.frames)) if work.has_survey else ():
            surveyed.append(await self._slices(index, inboxes))
            await loop.run_in_executor(self._executor, work.survey, surveyed[-1], num_values(part.frames[index]))
        await loop.run_in_executor(self._executor, work.decide)
        for index in range(first, len(part.frames)):
            encoded = surveyed[index - first] if surveyed else await self._slices(index, inboxes)
            if part.have <= index:
                frame = part.frames[index]
                part.put(index, await loop.run_in_executor(self._executor, work.reduce, encoded, num_values(frame)))

    async def _slices(self, index: int, inboxes: dict[str, Inbox]) -> Sequence[bytes]:
        return [await self._slice_of(member, index, inboxes) for member in self._work.contributors]

    async def _slice_of(self, member: Contribution, index: int, inboxes: dict[str, Inbox]) -> bytes:
        peer = member.peer_id
        if peer == self._me:
            return await self._encoded(self._part.frames[index])
        try:
            async with asyncio.timeout(self._limit_s):
                if peer != self._part.owner:
                    return await inboxes[peer].take()
                await self._part.keeps(index + 1)
        except TimeoutError:
            raise PeerUnreachable("its slices are not all there", peer_id=peer) from None
        return self._part.frame(index)
