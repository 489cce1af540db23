"""Drives the state machine of one step: turns its actions into calls, and their results into events.

Promises are written to disk here. `peer_calls` carries reports, signed groups and votes, `cluster_head` and
`cluster_follower` the work of followers, and `reductions` the slices.

A driver lives from one committed state to the next, the member's interval included. `run` owns its tasks. Requests of
peers arrive through `round_service`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, PeerRefused
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import FollowReply, FollowRequest
from swarm_protocol.reduction_messages import ReduceOpening

from swarm.network.interface import Stream
from swarm.threads import in_executor
from swarm.training.member.cluster_follower import ClusterFollower
from swarm.training.member.cluster_head import ClusterHead
from swarm.training.member.current_step import CurrentStep
from swarm.training.member.interval_loop import IntervalOffer
from swarm.training.member.peer_calls import PeerQueries, TakenReports, announce, cast_vote, send_report
from swarm.training.member.progress_reports import measured
from swarm.training.member.reductions import Reductions, commit_slices
from swarm.training.member.shown_groups import ASK_AFTER_S, ShownGroups
from swarm.training.round import state_machine
from swarm.training.round.group_formation import awaited_peers, num_lacking
from swarm.training.round.promise import PromiseFile, promise_of
from swarm.training.round.round_events import (
    Action,
    Announce,
    Ask,
    CastVote,
    Event,
    Finish,
    GiveUp,
    Offered,
    Query,
    Recover,
    Reduce,
    Reply,
    ShowEvidence,
    Sign,
    Tick,
)
from swarm.training.round.round_state import may_leave_now
from swarm.training.trainer_events import Waiting

DISK_S = 2.0  # pause before a promise is written again that the disk did not take


@dataclass(kw_only=True, eq=False)
class RoundDriver(CurrentStep):
    """Drives one step.

    `promises` outlive the process; they are None if this member keeps none. The contribution is offered `rest_s`
    seconds after the interval has ended.
    """

    promises: PromiseFile | None
    rest_s: float

    def __post_init__(self) -> None:
        self.offer: IntervalOffer | None = None
        """This member's contribution, once its interval has ended."""
        self.reductions = Reductions(self)
        self.groups = ShownGroups(self)
        self.queries = PeerQueries(self)
        self.reports = TakenReports(self, self.queries, self.groups)
        # a member without clusters is neither, nor is a trainer that takes a vacant place in the round
        self._head = ClusterHead(self) if self.setup.me in self.setup.clusters.heads else None
        self._follower = ClusterFollower(self, self.queries) if self.setup.follows else None
        self._certificate = b""
        self._offered_at: float | None = None
        self._unwritten = ""  # why the disk takes no promise

    @property
    def group(self) -> tuple[str, ...]:
        """The members of the attempt's group; empty if there is none yet."""
        return self.state.signed.group.peer_ids if self.state.signed else ()

    @property
    def is_led(self) -> bool:
        """Return whether a head has accepted this follower, and will tell it what is committed."""
        return self._follower is not None and self._follower.is_led

    @property
    def waiting(self) -> Waiting | None:
        """Return what this member waits for; None while its interval runs."""
        if self.waits_s is None or self._certificate:
            return None
        return Waiting(
            peers=awaited_peers(self.state),
            seconds=self.waits_s,
            num_lacking=num_lacking(self.state),
            is_for_disk=bool(self._unwritten),
        )

    @property
    def waits_s(self) -> float | None:
        """The seconds since this member's contribution was offered, or None if it was not."""
        return None if self._offered_at is None else asyncio.get_running_loop().time() - self._offered_at

    def leave(self) -> None:
        """Make `run` check whether this member may leave now. Call this once `intervals` has been told to leave."""
        self.feed(Tick())

    async def run(self) -> bytes:
        """Drive the step. Return the certificate that ends it, or empty bytes if this member leaves before (see
        `may_leave_now`)."""
        now = asyncio.get_running_loop().time
        self.log.enter(measured(self.state), now())
        async with asyncio.TaskGroup() as tasks:
            self.open(tasks)
            try:
                self.start(self._offer_contribution(), "offer")
                if self._follower is not None:
                    self.start(self._follower.run(), "follow")
                while not self._certificate:
                    if self.intervals.is_leaving and may_leave_now(self.state):
                        return b""
                    event = await self._next()
                    if isinstance(event, Offered):
                        self._offered_at = now()
                    before = self.state
                    self.state, actions = state_machine.step(before, event, now())
                    self.log.enter(measured(self.state), now())
                    self.log.refuse_new(self.state.faults.accused, before.faults.accused)
                    if self.state.asked != before.asked:
                        self.end_attempt()
                    for action in actions:
                        if isinstance(action, Ask | Sign | CastVote) and not await self._keep_promise():
                            return b""
                        await self._act(action)
                await self.reductions.keep_drawn(await self.context.check(self._certificate, is_own=True))
            finally:
                self._close()
        return self._certificate

    async def _next(self) -> Event:
        try:
            async with asyncio.timeout_at(state_machine.wake_at(self.state)):
                return await self.events.get()
        except TimeoutError:
            return Tick()

    async def _act(self, action: Action) -> None:  # noqa: C901 - one case an action
        match action:
            case Ask():
                self.start(send_report(self, self.queries, self.groups, action), "ask", in_attempt=True)
            case Reduce(signed=signed, sits_out=True):
                self.reductions.refuse(signed)
            case Reduce(signed=signed):
                self.start(self.reductions.reduce(signed, self.offer), "reduce", in_attempt=True)
            case Recover():
                self.start(self.reductions.recover(action), "recover", in_attempt=True)
            case Reply(peer=peer, reply=reply):
                self.reports.reply(peer, reply)
            case Query(peers=peers, hurry=hurry):
                self._query(peers, hurry=hurry)
            case Sign():
                await self.reports.sign(action)
            case CastVote():
                await cast_vote(self, action)
            case Announce(abort=abort, peers=peers):
                await announce(self.context, abort, peers)
            case ShowEvidence(peers=peers):
                self.convictions.show(peers)
            case GiveUp():
                self.end_attempt()
                self.on_abort(action)
            case Finish(certificate=certificate):
                self._certificate = certificate

    def _query(self, peers: tuple[str, ...], *, hurry: bool) -> None:
        for peer in peers:
            if peer != self.context.network.peer_id:
                self.start(self.queries.query(peer, hurry=hurry), f"query {short_id(peer)}")
            elif hurry:
                self.hurry()

    async def _keep_promise(self) -> bool:
        """Write the attempt, the lock and the prepare vote to disk before others hear of them. While the disk takes
        nothing, try again, and let nobody hear of them. Return False if this member is to leave meanwhile."""
        store, promise = self.promises, promise_of(self.state)
        own_vote = promise.own_prepare_vote
        while store is not None and not store.has(promise):
            parts = self.context.replica.parts_of(own_vote.vote.outcome.origin_digest) if own_vote is not None else ()
            try:
                await in_executor(self.context.executor, store.write, replace(promise, parts=parts))
            except ConfigError as error:
                if self.intervals.is_leaving:
                    return False
                if self._unwritten != (reason := str(error)):
                    self._unwritten = reason
                    self.on_abort(GiveUp(step=self.setup.step, attempt=self.state.attempt, reason=reason))
                await asyncio.sleep(DISK_S)
        self._unwritten = ""
        return True

    async def _offer_contribution(self) -> None:
        """Offer the contribution of this member's interval to the round, once the interval has ended."""
        offer = await self.intervals.offer(self.setup.step)
        if self.rest_s:
            await asyncio.sleep(self.rest_s)
        if offer.delta_F is not None:
            self.log.add("interval", offer.interval_s)
        offer = replace(offer, contribution=replace(offer.contribution, leaving=self.intervals.is_leaving))
        if self._head is not None:
            offer = await self._head.gather(offer)
        if self._follower is not None:
            self._follower.bring(offer)
        self.offer = await commit_slices(self.context, self.setup, offer)
        self.feed(Offered(contribution=self.offer.contribution, interval_s=self.offer.interval_s))

    def _close(self) -> None:
        """End the tasks of the step, which is over, and answer the peers that wait."""
        self.end_tasks()
        self.reductions.close()
        if self._head is not None:
            self._head.finish(self._certificate)
        if self._follower is not None:
            self._follower.drop()
        if self.offer is not None:
            # the driver is part of reference cycles, and would keep 4 bytes per parameter until the next garbage
            # collection
            self.offer = replace(self.offer, delta_F=None, tree=None)
        self.reports.close()

    # --- what peers ask, called by the service -----------------------------------------------------------------------

    async def serve_part(self, peer: str, opening: ReduceOpening, stream: Stream) -> None:
        """Serve a stream of a reduction, once this member takes part in the group that its `opening` names."""
        is_near = peer in (self.setup.roster or self.state.known) or peer in self.group
        if is_near and opening.group_digest not in self.groups:
            # a second group of one attempt convicts its coordinator, as long as the attempt lasts
            asking = self.groups.ask(peer, opening.group_digest, after_s=0.0 if self.group else ASK_AFTER_S)
            self.start(asking, f"ask {short_id(peer)} for its group")
        await self.reductions.accept(peer, opening, stream)

    async def follow(self, peer: str, request: FollowRequest, stream: Stream) -> None:
        """Take the work of `peer`, which follows this member, and serve its stream until the step is over."""
        if peer in self.state.faults.convicted:
            raise PeerRefused("evidence convicts it of a lie")
        if self._head is not None and request.state_digest == self.setup.state_digest:
            await self._head.serve(peer, stream, request.credential)
            return
        self.queries.look_at(peer)  # or this member is behind
        certificate = self.context.replica.certificate
        await stream.send(FollowReply(kind="committed", certificate=certificate).to_bytes())

    @property
    def known(self) -> tuple[str, ...]:
        """The peers that this member has seen, empty once there is a roster, which then says who is there."""
        return () if self.setup.roster else self.state.known[: limits.MAX_GROUP_MEMBERS]
