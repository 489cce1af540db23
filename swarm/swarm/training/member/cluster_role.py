"""Makes a member the head of its cluster for one step, or a follower that brings its work to the head.

A member of a run without clusters, or whose cluster is itself alone, is neither. `round_driver` owns this object, and
the task of `run`; what heads and followers do is `cluster_head`'s and `follower`'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from swarm_protocol.member_messages import FollowRequest

from swarm.network.interface import Stream
from swarm.training.member.cluster_head import ClusterHead
from swarm.training.member.follower import StepFollower
from swarm.training.member.interval_loop import IntervalOffer
from swarm.training.round.round_events import GiveUp
from swarm.training.round.round_state import RoundSetup
from swarm.training.state.run_context import RunContext


class ClusterRole:
    """Plays the role of the member of `context` in the step of `setup`, which began at `began_at`.

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
        """Return whether a head is there that will tell this trainer what is committed."""
        return self._follower is not None and self._follower.is_led

    async def run(self) -> None:
        """Follow the head, if this member has one; usually until cancelled."""
        if self._follower is not None:
            await self._follower.run()

    async def take_work(self, peer: str, request: FollowRequest, stream: Stream) -> bool:
        """Take the work of `peer`, which waits here until the step is over. Return False at once if this member heads
        no cluster at the state that the request names."""
        if self._head is None or request.state_digest != self._setup.state_digest:
            return False
        await self._head.serve(peer, stream, request.credential)
        return True

    async def bring_in(self, offer: IntervalOffer) -> IntervalOffer:
        """Return what goes into the round of this member's own `offer`: at a head with its followers' work. A follower
        brings its own to the head meanwhile."""
        if self._head is not None:
            offer = await self._head.gather(offer)
        if self._follower is not None:
            self._follower.bring(offer)
        return offer

    def finish(self, certificate: bytes) -> None:
        """Tell the followers what was committed, and let go of the pseudo-gradient, as the step is over."""
        if self._head is not None:
            self._head.finish(certificate)
        if self._follower is not None:
            self._follower.drop()
