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
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from swarm_compression.codec import Data
from swarm_protocol.errors import PeerViolation, RoundError, SwarmError
from swarm_protocol.training_messages import ReduceOpening
from torch import Tensor

from swarm.network.failpoints import FaultHook, no_faults
from swarm.network.interface import EndOfStream, Stream
from swarm.training.allreduce.backup_owner import MIN_MEMBERS, StandIn, backup_of
from swarm.training.allreduce.exchange import Exchange
from swarm.training.allreduce.own_part import OwnPart
from swarm.training.allreduce.part_owner import Scheme
from swarm.training.allreduce.part_result import PartResult
from swarm.training.allreduce.part_streams import PartStreams
from swarm.training.allreduce.peer_connections import PeerLines
from swarm.training.round.round_events import Signed
from swarm.trust.aggregation.aggregator import Report


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
        lines: PeerLines,
        signed: Signed,
        delta_N: Tensor | None,
        scheme: Scheme,
        executor: Executor,
        *,
        on_failure: Callable[[SwarmError], None],
        faults: FaultHook = no_faults,
    ) -> None:
        """Each member's stream handler of `lines.methods.reduce` calls `attend` of the butterfly for the same group.

        `on_failure` hears of the first failure. PeerViolation and PeerError name the peer at fault.
        """
        self._signed = signed
        self._group = signed.group
        self._me = signed.group.peer_ids.index(lines.network.peer_id)
        contribution_N = delta_N if signed.group.members[self._me].num_tokens else None
        self._streams = PartStreams(lines, signed, contribution_N, scheme, executor, faults=faults)
        self._parts = [PartResult(signed.group, index, scheme.codec) for index in range(len(signed.group.members))]
        self._own = OwnPart(self._streams, self._parts[self._me])
        self._on_failure = on_failure
        self._attended: set[tuple[str, str]] = set()
        self._standing_in: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._failed = False

    @property
    def digest(self) -> bytes:
        """Of the signed group, which names the reduction."""
        return self._signed.digest

    @property
    def report(self) -> Report:
        """What the aggregation of this member's part did to whom, by the order of those who contribute."""
        return self._own.report

    @property
    def lessened(self) -> dict[str, float]:
        """How much of whose pull is left in this member's part, of those for whom that is not all."""
        return self._own.lessened

    @property
    def bytes_sent(self) -> int:
        return self._streams.bytes_sent

    async def run(self) -> Reduction:
        """All parts' results, once this member has also handed out its own. After a failure: never, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                # of a vector with fewer blocks than members, some members own nothing
                if self._parts[self._me].frames:
                    self._tasks.create_task(self._hold(self._own.reduce()), name="own part")
                    self._tasks.create_task(self._own.hand_out(), name="hand out")
                for part in self._parts:
                    if part.index != self._me and part.frames:
                        self._tasks.create_task(self._exchange(part), name=f"exchange with {part.owner[-6:]}")
        finally:
            self._own.close()
        return Reduction(parts=tuple(part.data for part in self._parts))

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
            "exchange": opening.part == self._me and not self._own.is_closed,
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
                await self._own.serve(peer, stream)
            case "keep":
                await self._keep(part, stream)
            case "result":
                self._stand_in_for(part)
                await self._streams.send_result(stream, part, opening.frame)
            case "slices":
                await self._streams.send_slices(stream, part, opening.frame)

    async def _keep(self, part: PartResult, stream: Stream) -> None:
        for index in range(len(part.frames)):
            try:
                data = await stream.receive()
            except EndOfStream:
                return
            if not part.keep(index, data):
                raise PeerViolation("a slice of a wrong size", peer_id=part.owner)
        await self._streams.faults.reached("round.kept")

    async def _exchange(self, part: PartResult) -> None:
        exchange = Exchange(self._streams, part, lacks=self._own.lacks, stand_in=self._stand_in_for, fail=self._fail)
        if not await exchange.run():
            self._own.let_go(part.owner)
        if self._standing_in and backup_of(part.index, len(self._parts)) == self._me:
            self._standing_in.cancel()

    def _stand_in_for(self, part: PartResult) -> None:
        """Make the rest of the part's result, of which this member is the backup."""
        if part.complete or self._standing_in is not None:
            return
        if self._tasks is None or self._own.is_closed:
            raise RoundError("the reduction is over")

        async def stand_in() -> None:
            await self._streams.faults.reached("round.stand_in")
            try:
                await StandIn(self._streams, part).run()
            except SwarmError as error:
                part.fail(error)

        self._standing_in = self._tasks.create_task(stand_in(), name="stand in")

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
