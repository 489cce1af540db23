"""One step at a trainer that has no place in the round: it brings its work to a head, which brings it to the round.

It opens a stream to its first head at once, and turns to the second one if the first is gone or takes no more. Work
that a head has received goes to no other head, which could count it twice. If that head is gone before the round is
decided, the work is lost, and the trainer keeps its lease (see `clusters`).

`round_driver` owns the task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from swarm_compression import CodecError
from swarm_protocol.errors import RoundError, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import FollowerWork, FollowReply, FollowRequest

from swarm.network.interface import EndOfStream, Stream
from swarm.training.allreduce.parts import frames_of
from swarm.training.member.cluster_head import ALIVE_S
from swarm.training.member.interval_loop import IntervalOffer
from swarm.training.round.round_state import RoundSetup
from swarm.training.state.proof_reader import CALL_TIMEOUT_S
from swarm.training.state.run_context import RunContext, lasting

logger = logging.getLogger(__name__)

HEAD_SILENT_S = 4 * ALIVE_S
"""A head that says nothing for this long is gone."""
WELCOME_S = 2 * CALL_TIMEOUT_S
"""Time for which a follower waits for a head that is not at its step yet."""
RETRY_S = 1.0
MAX_RETRY_S = 15.0
"""The pause before all heads are asked again, while none has room, doubles up to this: in a run that is nearly full, or
grows fast, hundreds may ask for a place."""


class StepFollower:
    """Follows in the step of `setup`.

    `on_certificate` is called with a head and the certificate that it shows, `on_hurry` if the head asks for this,
    `on_full` once if no head has room for this trainer.
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
        """True while a head that is there has taken this trainer in."""
        self._context = context
        self._setup = setup
        self._on_certificate = on_certificate
        self._on_hurry = on_hurry
        self._on_full = on_full
        self._offer: asyncio.Future[IntervalOffer] = asyncio.get_running_loop().create_future()
        self._has_brought = False

    def bring(self, offer: IntervalOffer) -> None:
        """Bring `offer` to the head, as this trainer's interval has ended."""
        self._offer.set_result(offer)

    def drop(self) -> None:
        """Let go of the pseudo-gradient, as the step is over."""
        self._offer = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Follow until the work is brought to a head that is then gone; usually until cancelled."""
        is_told, pause_s = False, RETRY_S
        while not self._has_brought:
            is_full = True
            for head in self._setup.clusters.heads_of(self._setup.me):
                if not self._has_brought:
                    is_full &= await self._follow(head)
            # with overlap, one that the last round left out has a lease for this one, and its place in the next
            if is_full and not is_told and self._setup.me not in self._setup.leased:
                is_told = True
                self._on_full()
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_RETRY_S, 2 * pause_s) if is_full else RETRY_S

    async def _follow(self, head: str) -> bool:
        """Follow `head` until it is gone. Return whether it has no room."""
        context, setup = self._context, self._setup
        # a head refuses one that is about to expire, and a step may take hours
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
            bringing.cancel()
            await asyncio.wait({bringing})
            if not bringing.cancelled() and (error := bringing.exception()) is not None:
                raise error

    async def _bring(self, stream: Stream) -> None:
        offer = await asyncio.shield(self._offer)
        self._has_brought = True
        own = offer.contribution
        work = FollowerWork(num_tokens=own.num_tokens, num_samples=own.num_samples, loss=own.loss, leaving=own.leaving)
        await self._send(stream, work.to_bytes())
        for frame in frames_of(self._setup.num_values) if own.num_tokens else ():
            work_of = asyncio.get_running_loop().run_in_executor
            await self._send(stream, await work_of(self._context.executor, self._encoded, offer, frame))

    async def _send(self, stream: Stream, data: bytes) -> None:
        await stream.send(data)
        self.bytes_sent += len(data)

    def _encoded(self, offer: IntervalOffer, frame: slice) -> bytes:
        """Encode the contribution. Blocks."""
        context, delta_F = self._context, offer.delta_F
        assert delta_F is not None
        try:
            if context.residuals is not None:
                feedback = context.residuals.of(context.replica.fragment(self._setup.step))
                return feedback.encode(delta_F[frame], frame.start)
            return bytes(context.codec.encode(delta_F[frame]))
        except CodecError as error:
            raise RoundError(f"this member's contribution cannot be encoded: {error}") from error
