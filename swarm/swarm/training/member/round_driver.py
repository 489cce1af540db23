"""Drives the state machine of one step: turns its actions into calls, and their results into events.

Promises are written to disk here. `peer_calls` carries reports, signed groups and votes, `cluster_role` the work of
followers, and `reductions` the slices.

A driver lives from one committed state to the next, the member's interval included. `run` owns its tasks. Requests of
peers arrive through `round_service`, which calls the public methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Set
from dataclasses import replace
from functools import partial
from typing import Any

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, PeerRefused
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import FollowReply, FollowRequest
from swarm_protocol.reduction_messages import ReduceOpening
from swarm_protocol.training_messages import Ready, ReadyReply

from swarm.network.interface import Stream
from swarm.threads import in_executor
from swarm.training.evidence.convictions import Convictions
from swarm.training.member.cluster_role import ClusterRole
from swarm.training.member.interval_loop import IntervalLoop, IntervalOffer
from swarm.training.member.peer_calls import PeerQueries, ReportCalls, TakenReports, VoteCalls, announce
from swarm.training.member.progress_reports import DOWNWEIGHTED, LEFT_OUT, RoundLog, contribution_late, measured
from swarm.training.member.reductions import Reductions, commit_slices
from swarm.training.member.shown_groups import ASK_AFTER_S, ShownGroups
from swarm.training.round import state_machine
from swarm.training.round.group_formation import awaited_peers, num_lacking
from swarm.training.round.group_members import own_report
from swarm.training.round.promise import Promise, PromiseFile
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
from swarm.training.round.round_state import (
    HeldLock,
    OwnPrepareVote,
    RoundSetup,
    RoundState,
    may_leave_now,
    with_coordinator,
)
from swarm.training.state.certificate_history import Proof
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import ContributionLate, Waiting

DISK_S = 2.0  # pause before a promise is written again that the disk did not take


class RoundDriver:
    """Drives one step of the member of `context`, from `state` on. The task group `background` outlives the driver.

    `intervals` makes this member's contribution, which is offered `rest_s` seconds after the interval has ended.
    `promises` outlive the process; they are None if this member keeps none. `on_abort` is called with each failed
    attempt.
    """

    def __init__(
        self,
        context: RunContext,
        state: RoundState,
        intervals: IntervalLoop,
        *,
        convictions: Convictions,
        promises: PromiseFile | None,
        background: asyncio.TaskGroup,
        on_abort: Callable[[GiveUp], None],
        rest_s: float = 0.0,
    ) -> None:
        self.log = RoundLog()
        self.offer: IntervalOffer | None = None
        """This member's contribution, once its interval has ended."""
        self._context = context
        self._state = state
        self._intervals = intervals
        self._convictions = convictions
        self._promises = promises
        self._on_abort = on_abort
        self._rest_s = rest_s
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        on_reduced = partial(self.log.refuse, weight=DOWNWEIGHTED)
        self.reductions = Reductions(context, self.feed, on_reduced_weight=on_reduced, convict=convictions.convict)
        self._queries = PeerQueries(
            context,
            lambda: self._state,
            on_named=self._hear_of,
            feed=self.feed,
            spawn=self._spawn,
            on_certificate=convictions.hear,
        )
        self._role = ClusterRole(
            context,
            self.setup,
            began_at=state.began_at,
            on_reduced_weight=on_reduced,
            on_certificate=self._take_certificate,
            on_hurry=self.hurry,
            on_abort=on_abort,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempt_tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._certificate = b""
        self._offered: tuple[float, float] | None = None  # by the loop's clock and by the network's
        self._kept: tuple[int, HeldLock | None, OwnPrepareVote | None] | None = None
        self.groups = ShownGroups(context, lambda: self._state, feed=self.feed, heard=convictions.heard)
        self._report_calls = ReportCalls(context, self._queries, self.groups, feed=self.feed)
        self._reports = TakenReports(
            context,
            self.setup,
            self.groups,
            feed=self.feed,
            look_at=self.look_at,
            on_left_out=partial(self.log.refuse, weight=LEFT_OUT),
        )
        self._votes = VoteCalls(context, feed=self.feed, background=background)

    @property
    def setup(self) -> RoundSetup:
        return self._state.setup

    @property
    def attempt(self) -> int:
        return self._state.attempt

    @property
    def group(self) -> tuple[str, ...]:
        """The members of the attempt's group; empty if there is none yet."""
        return self._state.signed.group.peer_ids if self._state.signed else ()

    def is_coordinated_by(self, peer: str, attempt: int) -> bool:
        """Return whether `peer` coordinates this member's attempt, or the later one that it is about to move to."""
        state = self._state
        is_near = attempt in {state.attempt, state.attempts.later}
        return is_near and with_coordinator(replace(state, attempt=attempt)).coordinator == peer

    @property
    def accused(self) -> dict[str, str]:
        """The peers that this member has seen break the protocol, and how."""
        return dict(self._state.faults.accused)

    @property
    def bytes_sent(self) -> int:
        senders = (self._report_calls, self._reports, self.reductions, self._role, self._votes)
        return sum(each.bytes_sent for each in senders)

    @property
    def promise(self) -> Promise:
        """Return the promise that binds this member in later attempts of the step."""
        state = self._state
        return Promise(
            report=own_report(state), first_attempt=state.setup.first_attempt, own_prepare_vote=state.own_prepare_vote
        )

    @property
    def waiting(self) -> Waiting | None:
        """Return what this member waits for; None while its interval runs."""
        if self._offered is None or self._certificate:
            return None
        return Waiting(
            peers=awaited_peers(self._state),
            seconds=asyncio.get_running_loop().time() - self._offered[0],
            num_lacking=num_lacking(self._state),
        )

    @property
    def is_led(self) -> bool:
        """Return whether this trainer is connected to a head, which will tell it what is committed."""
        return self._role.is_led

    def lost_contribution(self, proof: Proof) -> ContributionLate | None:
        """Return this member's work for the step as an event, if `proof` shows that the step was committed without
        it."""
        offered_at = self._offered[1] if self._offered else None
        return contribution_late(self._context, self.setup, self._state.mine, proof, offered_at)

    @property
    def abstains(self) -> bool:
        """Return whether this member waits for a state that it has lost."""
        return self._state.abstains

    def feed(self, event: Event) -> None:
        self._events.put_nowait(event)

    def leave(self) -> None:
        """Make `run` check whether this member may leave now. Call this once `intervals` has been told to leave."""
        self.feed(Tick())

    async def run(self) -> bytes:
        """Drive the step. Return the certificate that ends it, or empty bytes if this member leaves before (see
        `may_leave_now`)."""
        now = asyncio.get_running_loop().time
        self.log.enter(measured(self._state), now())
        async with asyncio.TaskGroup() as tasks:
            self._group = tasks
            try:
                self._spawn(self._offer_contribution(), "offer")
                self._spawn(self._role.run(), "follow")
                while not self._certificate:
                    if self._intervals.is_leaving and may_leave_now(self._state):
                        return b""
                    event = await self._next()
                    if isinstance(event, Offered):
                        self._offered = (now(), self._context.network.now())
                    before = self._state
                    self._state, actions = state_machine.step(before, event, now())
                    self.log.enter(measured(self._state), now())
                    self.log.refuse_new(self._state.faults.accused, before.faults.accused)
                    if self._state.asked != before.asked:
                        self._end_attempt()
                    for action in actions:
                        if isinstance(action, Ask | Sign | CastVote) and not await self._keep_promise():
                            return b""
                        await self._act(action)
                await self.reductions.keep_drawn(await self._context.check(self._certificate, is_own=True))
            finally:
                self._close()
        return self._certificate

    def _close(self) -> None:
        """End the tasks of the step, which is over, and answer the peers that wait."""
        self._group = None  # from now on, peers that records name are asked by the next step
        for task in self._tasks:
            task.cancel()
        self.reductions.close()
        self._role.finish(self._certificate)
        self._drop_contribution()
        self._reports.close()

    # --- what peers ask, called by the service -----------------------------------------------------------------------

    async def take_report(self, peer: str, ready: Ready) -> ReadyReply:
        """Take the report of `peer`. Return the state machine's answer, or `pending` after POLL_S."""
        return await self._reports.take(peer, ready)

    async def serve_part(self, peer: str, opening: ReduceOpening, stream: Stream) -> None:
        """Serve a stream of a reduction, once this member takes part in the group that its `opening` names."""
        is_near = peer in (self.setup.roster or self._state.known) or peer in self.group
        if self._group is not None and is_near and opening.group_digest not in self.groups:
            # a second group of one attempt convicts its coordinator, as long as the attempt lasts
            after_s = 0.0 if self.group else ASK_AFTER_S
            self._spawn(
                self.groups.ask(peer, opening.group_digest, after_s=after_s), f"ask {short_id(peer)} for its group"
            )
        await self.reductions.accept(peer, opening, stream)

    async def follow(self, peer: str, request: FollowRequest, stream: Stream) -> None:
        """Take the work of `peer`, which follows this member, and serve its stream until the step is over."""
        if peer in self._state.faults.convicted:
            raise PeerRefused("evidence convicts it of a lie")
        if await self._role.take_work(peer, request, stream):
            return
        self.look_at(peer)  # or this member is behind
        certificate = self._context.replica.certificate
        await stream.send(FollowReply(kind="committed", certificate=certificate).to_bytes())

    @property
    def known(self) -> tuple[str, ...]:
        """The peers that this member has seen, empty once there is a roster, which then says who is there."""
        return () if self.setup.roster else self._state.known[: limits.MAX_GROUP_MEMBERS]

    def hurry(self) -> None:
        """End this member's interval."""
        self._intervals.hurry(self.setup.step)

    @property
    def looking_at(self) -> Set[str]:
        """The peers that were asked where they are, and have not answered yet."""
        return self._queries.looking_at

    def look_at(self, peer: str) -> None:
        """Ask `peer` where it is, which also tells it that this member is there."""
        if self._group is not None:
            self._queries.look_at(peer)

    def _hear_of(self, peer: str) -> None:
        # another peer named it: it counts only once it has answered itself
        if peer not in self._state.known:
            self.look_at(peer)

    # --- actions of the state machine --------------------------------------------------------------------------------

    async def _next(self) -> Event:
        try:
            async with asyncio.timeout_at(state_machine.wake_at(self._state)):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    async def _act(self, action: Action) -> None:
        match action:
            case Ask() | Reduce() | Recover():
                task = self._spawn(self._work(action), type(action).__name__.lower())
                self._attempt_tasks.add(task)
                task.add_done_callback(self._attempt_tasks.discard)
            case Reply(peer=peer, reply=reply):
                self._reports.reply(peer, reply)
            case Query(peers=peers, hurry=hurry):
                self._query_or_hurry(peers, hurry=hurry)
            case Sign():
                await self._reports.sign(action)
            case CastVote():
                await self._votes.cast(action)
            case Announce(abort=abort, peers=peers):
                await announce(self._context, abort, peers)
            case ShowEvidence(peers=peers):
                self._convictions.show(peers)
            case GiveUp():
                self._end_attempt()
                self._on_abort(action)
            case Finish(certificate=certificate):
                self._certificate = certificate

    async def _offer_contribution(self) -> None:
        """Offer the contribution of this member's interval to the round, once the interval has ended."""
        offer = await self._intervals.offer(self.setup.step)
        if self._rest_s:
            await asyncio.sleep(self._rest_s)
        if offer.delta_F is not None:
            self.log.add("interval", offer.interval_s)
        offer = replace(offer, contribution=replace(offer.contribution, leaving=self._intervals.is_leaving))
        offer = await commit_slices(self._context, self.setup, await self._role.bring_in(offer))
        self.offer = offer
        self.feed(Offered(contribution=offer.contribution, interval_s=offer.interval_s))

    def _drop_contribution(self) -> None:
        """Drop the pseudo-gradient now: the driver is part of reference cycles, and would keep 4 bytes per parameter
        until the next garbage collection."""
        if self.offer is not None:
            self.offer = replace(self.offer, delta_F=None, tree=None)

    async def _take_certificate(self, peer: str, certificate: bytes) -> None:
        """Take the certificate that the head `peer` shows. Raises PeerViolation or IntegrityError."""
        if (further := await self._queries.overtaken(peer, certificate)) is not None:
            self.feed(further)

    async def _keep_promise(self) -> bool:
        """Write the attempt, the lock and the prepare vote to disk before others hear of them. While the disk takes
        nothing, try again, and let nobody hear of them. Return False if this member is to leave meanwhile."""
        store, own_vote = self._promises, self._state.own_prepare_vote
        bound = (self.attempt, self._state.lock, own_vote)
        while store is not None and self._kept != bound:
            parts = self._context.replica.parts_of(own_vote.vote.outcome.origin_digest) if own_vote is not None else ()
            try:
                await in_executor(self._context.executor, store.write, replace(self.promise, parts=parts))
                self._kept = bound
            except ConfigError as error:
                if self._intervals.is_leaving:
                    return False
                self._on_abort(GiveUp(step=self.setup.step, attempt=self.attempt, reason=str(error), missing=()))
                await asyncio.sleep(DISK_S)
        return True

    def _work(self, action: Ask | Reduce | Recover) -> Coroutine[Any, Any, None]:
        """Return the coroutine for `action`, which ends with the attempt at the latest."""
        match action:
            case Ask():
                return self._report_calls.send(action)
            case Reduce(signed=signed):
                return self.reductions.reduce(signed, self.offer)
            case Recover():
                return self.reductions.recover(action)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        assert self._group is not None
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _end_attempt(self) -> None:
        for task in self._attempt_tasks:
            task.cancel()

    def _query_or_hurry(self, peers: tuple[str, ...], *, hurry: bool) -> None:
        for peer in peers:
            if peer != self._context.network.peer_id:
                self._spawn(self._queries.query(peer, hurry=hurry), f"query {short_id(peer)}")
            elif hurry:
                self.hurry()
