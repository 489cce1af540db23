"""Makes a member the head of its cluster for one step, or a follower that brings its work to a head (`ClusterRole`).

A member of a run without clusters is neither, nor is a trainer that takes a vacant place in the round. `cluster_head`
does the work of a head.

A follower has no place in the round (`StepFollower`). It opens a stream to its first head at once, and turns to the
second one if the first is gone or has no room. Work that it has begun to send to a head is sent to no other head, so
that it is not counted twice. If that head is gone before the round is decided, the work is lost, and the trainer keeps
its lease (see `clusters`).

`round_driver` owns the role, and the task of its `run`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from swarm_protocol.errors import SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import FollowerWork, FollowReply, FollowRequest

from swarm.ended_tasks import end_tasks
from swarm.network.interface import EndOfStream, Stream
from swarm.threads import in_executor
from swarm.training.allreduce.parts import encode_slice, frames_of
from swarm.training.member.cluster_head import ALIVE_S, ClusterHead
from swarm.training.member.interval_loop import IntervalOffer
from swarm.training.round.round_events import GiveUp
from swarm.training.round.round_state import RoundSetup
from swarm.training.state.proof_reader import CALL_TIMEOUT_S
from swarm.training.state.run_context import RunContext, lasting

logger = logging.getLogger(__name__)

HEAD_SILENT_S = 4 * ALIVE_S
"""A head that sends nothing for this many seconds counts as gone."""
WELCOME_S = 2 * CALL_TIMEOUT_S
"""Seconds for which a follower waits for a head that is not at its step yet."""
RETRY_S = 1.0
MAX_RETRY_S = 15.0
"""While no head has room, the pause before all heads are asked again doubles up to this: in a run that is nearly full,
or grows fast, hundreds may ask for a place."""


class StepFollower:
    """Follows a head in the step of `setup`, and brings it this trainer's work.

    `on_certificate` is called with a head and the certificate that the head shows, `on_hurry` when the head asks this
    trainer to hurry, and `on_full` once if no head has room for this trainer.
    """

    def __init__(
        self,
        context: RunContext,
        setup: RoundSetup,
        *,
        on_certificate: Callable[[str, bytes], Awaitable[None]],
        on_hurry: Callable[[], None],
        on_full: Callable[[], None],
    ) -> None:
        self.bytes_sent = 0
        self.is_led = False
        """True while this trainer is connected to a head that has accepted it."""
        self._context = context
        self._setup = setup
        self._on_certificate = on_certificate
        self._on_hurry = on_hurry
        self._on_full = on_full
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
                self._on_full()
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_RETRY_S, 2 * pause_s) if is_full else RETRY_S

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
                    await self._on_certificate(head, reply.certificate)
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
                        self._on_hurry()
                    case "late":
                        logger.warning("%s went to the round without this trainer's work", short_id(head))
                    case "committed":
                        await self._on_certificate(head, reply.certificate)
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
        self.bytes_sent += len(data)


class ClusterRole:
    """Makes the member of `context` a head, a follower or neither in the step of `setup`, which began at `began_at`.

    The callbacks are those of `ClusterHead` and `StepFollower`; `on_abort` is called once if no head has room.
    """

    def __init__(
        self,
        context: RunContext,
        setup: RoundSetup,
        *,
        began_at: float,
        on_reduced_weight: Callable[[str, str], None],
        on_certificate: Callable[[str, bytes], Awaitable[None]],
        on_hurry: Callable[[], None],
        on_abort: Callable[[GiveUp], None],
    ) -> None:
        self._setup = setup
        self._head: ClusterHead | None = None
        self._follower: StepFollower | None = None
        if setup.me in setup.clusters.heads:
            self._head = ClusterHead(context, setup, began_at=began_at, on_reduced_weight=on_reduced_weight)
        elif setup.follows:
            reason = f"the run is full: {context.replica.config.max_trainers} trainers have a place in it"
            full = GiveUp(step=setup.step, attempt=setup.first_attempt, reason=reason, missing=())
            self._follower = StepFollower(
                context, setup, on_certificate=on_certificate, on_hurry=on_hurry, on_full=lambda: on_abort(full)
            )

    @property
    def bytes_sent(self) -> int:
        """The bytes of the work that this member has brought to its head."""
        return self._follower.bytes_sent if self._follower else 0

    @property
    def is_led(self) -> bool:
        """Return whether this trainer is connected to a head, which will tell it what is committed."""
        return self._follower is not None and self._follower.is_led

    async def run(self) -> None:
        """Follow a head if this member is a follower. Usually runs until cancelled."""
        if self._follower is not None:
            await self._follower.run()

    async def take_work(self, peer: str, request: FollowRequest, stream: Stream) -> bool:
        """Take the work of `peer`, and serve its stream until the step is over. Return False at once if this member
        heads no cluster at the state that the request names."""
        if self._head is None or request.state_digest != self._setup.state_digest:
            return False
        await self._head.serve(peer, stream, request.credential)
        return True

    async def bring_in(self, offer: IntervalOffer) -> IntervalOffer:
        """Return the offer to put into the round: at a head, `offer` with its followers' work, else `offer` itself. A
        follower also sends it to its head."""
        if self._head is not None:
            offer = await self._head.gather(offer)
        if self._follower is not None:
            self._follower.bring(offer)
        return offer

    def finish(self, certificate: bytes) -> None:
        """Tell the followers what was committed, and release the pseudo-gradient, since the step is over."""
        if self._head is not None:
            self._head.finish(certificate)
        if self._follower is not None:
            self._follower.drop()
