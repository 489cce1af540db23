"""From a signed group to the outcome to vote for: by reducing, or by getting the parts that others have reduced.

Keeps the butterflies of the attempts at one step, and leads members' streams to them. `driver` owns the tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm_compression.codec import Data
from swarm_protocol.errors import PeerError, PeerViolation, RoundError, SwarmError
from swarm_protocol.training_messages import Group, Outcome
from torch import Tensor

from swarm.network.interface import Stream
from swarm.training.allreduce.bandwidth import MeteredStream
from swarm.training.allreduce.butterfly import Butterfly
from swarm.training.allreduce.part_owner import Scheme
from swarm.training.round.coordinator import short
from swarm.training.round.round_context import Seat
from swarm.training.round.round_events import Event, Reduced, ReduceFailed, Signed
from swarm.training.round.round_log import LESSENED, RoundLog
from swarm.training.state.state_sync import mend

logger = logging.getLogger(__name__)

GROUP_WAIT_S = 5.0
"""How long a member's stream waits for this member to hear of its group."""


@dataclass(slots=True, eq=False)
class _Place:
    """Where the butterfly of one group will be, and how many streams wait there."""

    butterfly: asyncio.Future[Butterfly | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    num_waiting: int = 0


class Reductions:
    """Those of one step. `feed` takes the events that they end in, `log` whose contributions counted for less."""

    def __init__(self, seat: Seat, feed: Callable[[Event], None], log: RoundLog) -> None:
        self.bytes_sent = 0
        self._seat = seat
        self._feed = feed
        self._log = log
        self._places: dict[bytes, _Place] = {}

    async def reduce(self, signed: Signed, delta_N: Tensor | None) -> None:
        """Take part. Ends with Reduced; after ReduceFailed it goes on until cancelled (see `butterfly`)."""
        seat, group = self._seat, signed.group
        await mend(seat, group)
        if not group.part_values:
            await self._propose(group.attempt, signed.digest, group, ())
            return
        butterfly = Butterfly(
            seat.lines,
            signed,
            delta_N,
            self._scheme(group),
            seat.executor,
            on_failure=lambda error: self._feed(failure(group.attempt, error)),
            faults=seat.faults,
        )
        seat.meter.begin([peer for peer in group.peer_ids if peer != seat.network.peer_id])
        self._place(signed.digest).butterfly.set_result(butterfly)
        try:
            reduction = await butterfly.run()
        except BaseException:
            self._places.pop(signed.digest, None)
            raise
        finally:
            self.bytes_sent += butterfly.bytes_sent
        self._note(butterfly.lessened)
        # its place stays: who stands in for an owner that fails late may need this member's slices
        await self._propose(group.attempt, signed.digest, group, reduction.parts)

    async def recover(self, signed: Signed, outcome: Outcome, holders: Sequence[str]) -> None:
        """Get the parts of `outcome`. Ends with Reduced or ReduceFailed."""
        seat, attempt = self._seat, signed.group.attempt
        await mend(seat, signed.group)
        if seat.replica.proposal(outcome) is not None:
            self._feed(Reduced(attempt=attempt, outcome=outcome))
            return
        try:
            origin = seat.notary.read_group(signed.group.origin or signed.data, seat.network.now()).group
            parts = await seat.fetcher.parts(origin, outcome, holders, seat.codec)
            await self._propose(attempt, outcome.origin_digest, origin, parts)
        except SwarmError as error:
            self._feed(failure(attempt, error))

    async def attend(self, peer: str, signed: Signed, stream: Stream) -> None:
        """Lead `peer`'s stream to the butterfly of its group, once this member takes part in it. Raises RoundError."""
        butterfly, place = None, self._place(signed.digest)
        metered = MeteredStream(stream, lambda rate: self._seat.meter.arrived(peer, rate))
        place.num_waiting += 1
        try:
            async with asyncio.timeout(GROUP_WAIT_S):
                butterfly = await asyncio.shield(place.butterfly)
        except TimeoutError:
            pass  # said below
        finally:
            place.num_waiting -= 1
            if not place.num_waiting and not place.butterfly.done():
                self._places.pop(signed.digest, None)
        if butterfly is None:
            raise RoundError(f"this member takes no part in attempt {signed.group.attempt}")
        await butterfly.attend(peer, metered)

    def close(self) -> None:
        """The step is over: streams that wait for a group wait in vain."""
        for place in self._places.values():
            if not place.butterfly.done():
                place.butterfly.set_result(None)

    def _note(self, lessened: Mapping[str, float]) -> None:
        for peer, kept in lessened.items():
            how = f"keeps {kept:.0%} of its pull" if kept else "is left out"
            self._log.refuse(peer, f"its contribution {how} in the part that this member reduces", LESSENED)

    def _place(self, digest: bytes) -> _Place:
        if digest not in self._places:
            self._places[digest] = _Place()
        return self._places[digest]

    def _scheme(self, group: Group) -> Scheme:
        seat = self._seat
        num_contributors = sum(member.num_tokens > 0 for member in group.members)
        aggregator = seat.replica.config.aggregator_for(num_contributors)
        if aggregator.name != seat.replica.config.aggregator:
            logger.warning("with %d contributions this round's aggregator is %s", num_contributors, aggregator.name)
        feedback = seat.residuals.of(seat.replica.fragment(group.step)) if seat.residuals else None
        return Scheme(codec=seat.codec, aggregator=aggregator, feedback=feedback)

    async def _propose(self, attempt: int, digest: bytes, origin: Group, parts: tuple[Data, ...]) -> None:
        try:
            outcome = await self._seat.replica.propose(self._seat.executor, digest, origin, parts)
        except SwarmError as error:
            self._feed(failure(attempt, error))
        else:
            await self._seat.faults.reached("round.proposed")
            self._feed(Reduced(attempt=attempt, outcome=outcome))


def failure(attempt: int, error: SwarmError) -> ReduceFailed:
    """Who is to blame for `error`: whoever broke the protocol or could not be reached, but not who only reported it."""
    peers = (error.peer_id,) if error.peer_id else ()
    reason = f"{short(error.peer_id)}: {error.message}" if peers else error.message
    if isinstance(error, PeerViolation):
        return ReduceFailed(attempt=attempt, reason=reason, accused=peers)
    if isinstance(error, PeerError):
        return ReduceFailed(attempt=attempt, reason=reason, unreachable=peers)
    return ReduceFailed(attempt=attempt, reason=error.message)
