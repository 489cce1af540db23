"""Brings the work of a trainer that has no place in the round to the head of its cluster.

A follower opens a stream to its first head at once, and turns to the second one if the first is gone or has no room.
Work that it has begun to send to a head is sent to no other head, so that it is not counted twice. If that head is gone
before the round is decided, the work is lost, and the trainer keeps its lease (see `clusters`). `cluster_head` is the
other side of the stream.

`round_driver` owns the follower, and the task of its `run`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from swarm_protocol.errors import SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import FollowerWork, FollowReply, FollowRequest

from swarm.ended_tasks import end_tasks
from swarm.network.interface import EndOfStream, Stream
from swarm.threads import in_executor
from swarm.training.allreduce.parts import encode_slice, frames_of
from swarm.training.member.cluster_head import ALIVE_S
from swarm.training.member.current_step import CurrentStep
from swarm.training.member.interval_loop import IntervalOffer
from swarm.training.member.peer_calls import PeerQueries
from swarm.training.round.round_events import GiveUp
from swarm.training.state.proof_reader import CALL_TIMEOUT_S
from swarm.training.state.run_context import lasting

logger = logging.getLogger(__name__)

HEAD_SILENT_S = 4 * ALIVE_S
"""A head that sends nothing for this many seconds counts as gone."""
WELCOME_S = 2 * CALL_TIMEOUT_S
"""Seconds for which a follower waits for a head that is not at its step yet."""
RETRY_S = 1.0
MAX_RETRY_S = 15.0
"""While no head has room, the pause before all heads are asked again doubles up to this: in a run that is nearly full,
or grows fast, hundreds may ask for a place."""


class ClusterFollower:
    """Follows a head in one step, and brings it this trainer's work. `queries` take the certificates that heads
    show."""

    def __init__(self, step: CurrentStep, queries: PeerQueries) -> None:
        self.is_led = False
        """True while this trainer is connected to a head that has accepted it."""
        self._step = step
        self._queries = queries
        self._context = step.context
        self._setup = step.setup
        self._offer: asyncio.Future[IntervalOffer] = asyncio.get_running_loop().create_future()
        self._has_brought = False

    def bring(self, offer: IntervalOffer) -> None:
        """Send `offer` to the head, since this trainer's interval has ended."""
        self._offer.set_result(offer)

    def drop(self) -> None:
        """Release the pseudo-gradient, since the step is over."""
        self._offer = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Follow heads until one has got this trainer's work and is gone. Usually runs until cancelled."""
        is_told, pause_s = False, RETRY_S
        while not self._has_brought:
            is_full = True
            for head in self._setup.clusters.heads_of(self._setup.me):
                if not self._has_brought:
                    is_full &= await self._follow(head)
            # with overlap, a trainer that the last round left out still has a lease for this one, and its place in the
            # next
            if is_full and not is_told and self._setup.me not in self._setup.leased:
                is_told = True
                self._tell_full()
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_RETRY_S, 2 * pause_s) if is_full else RETRY_S

    def _tell_full(self) -> None:
        setup = self._setup
        reason = f"the run is full: {self._context.replica.config.max_trainers} trainers have a place in it"
        self._step.on_abort(GiveUp(step=setup.step, attempt=setup.first_attempt, reason=reason))

    async def _follow(self, head: str) -> bool:
        """Follow `head` until it is gone. Return whether it has no room."""
        context, setup = self._context, self._setup
        # a head refuses a credential that is about to expire, and a step may take hours
        shown = lasting(setup.credential, context.network.now()) if setup.standings.is_new(setup.me) else None
        request = FollowRequest(
            run=setup.run, step=setup.step, state_digest=setup.state_digest, credential=shown
        ).to_bytes()
        try:
            async with context.network.stream(head, context.methods.follow, timeout_s=HEAD_SILENT_S) as stream:
                await stream.send(request)
                async with asyncio.timeout(WELCOME_S):
                    reply = FollowReply.from_bytes(await stream.receive())
                if reply.kind == "welcome":
                    await self._bring_and_listen(head, stream)
                elif reply.kind == "committed":
                    await self._queries.take_certificate(head, reply.certificate)
                return reply.kind == "full"
        except (SwarmError, EndOfStream, TimeoutError) as error:
            logger.warning("%s does not bring this trainer's work: %s", short_id(head), error or "it does not answer")
        return False

    async def _bring_and_listen(self, head: str, stream: Stream) -> None:
        bringing = asyncio.create_task(self._bring(stream), name=f"work for {short_id(head)}")
        self.is_led = True
        try:
            while True:
                reply = FollowReply.from_bytes(await stream.receive())
                match reply.kind:
                    case "hurry":
                        self._step.hurry()
                    case "late":
                        logger.warning("%s went to the round without this trainer's work", short_id(head))
                    case "committed":
                        await self._queries.take_certificate(head, reply.certificate)
                        return
        finally:
            self.is_led = False
            await end_tasks(bringing)
            if not bringing.cancelled() and (error := bringing.exception()) is not None:
                raise error

    async def _bring(self, stream: Stream) -> None:
        offer = await asyncio.shield(self._offer)
        self._has_brought = True
        own = offer.contribution
        work = FollowerWork(num_tokens=own.num_tokens, num_samples=own.num_samples, loss=own.loss, leaving=own.leaving)
        await self._send(stream, work.to_bytes())
        if not own.num_tokens or offer.delta_F is None:
            return
        context = self._context
        encode = partial(encode_slice, context.codec, context.feedback(self._setup.step), offer.delta_F)
        for frame in frames_of(self._setup.num_values):
            await self._send(stream, await in_executor(context.executor, encode, frame))

    async def _send(self, stream: Stream, data: bytes) -> None:
        await stream.send(data)
        self._step.log.sent(len(data))
