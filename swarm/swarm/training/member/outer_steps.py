"""Takes one member from each committed state to the next one.

`RunMember` creates `OuterSteps` once the member's first state is known, and owns the tasks. One `RoundDriver` drives
one step at a time, while the intervals run beside it (`interval_loop`) and the other members are watched
(`members_watch`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from swarm_protocol.errors import PeerTimeout, PeerUnreachable, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.records import RoundReport, TrainerRecord

from swarm.ended_tasks import unless
from swarm.evidence_folder import EvidenceFolder
from swarm.network.membership import Membership
from swarm.training.evidence.bans import Ban
from swarm.training.evidence.convictions import Convictions
from swarm.training.evidence.interval_audits import IntervalAudits
from swarm.training.inner.inner_loop import IntervalResult
from swarm.training.inner.interval import HeldOutLoss, Intervals
from swarm.training.member.held_out_effects import HeldOutEffects
from swarm.training.member.interval_loop import IntervalLoop
from swarm.training.member.members_watch import MembersWatch
from swarm.training.member.progress_reports import MemberReports, contribution_late, event_of_commit
from swarm.training.member.reductions import settle
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.round_service import RoundService
from swarm.training.round import state_machine
from swarm.training.round.promise import Promise, PromiseFile, promise_of
from swarm.training.round.round_events import Convicted, GiveUp
from swarm.training.round.round_state import rest_after
from swarm.training.state.certificate_history import Proof
from swarm.training.state.run_context import RunContext, recall_promise, setup_of
from swarm.training.state.state_sync import SyncResult, fetch_state
from swarm.training.trainer_events import StateFetched, Waiting

STATE_LOST = (
    "this member has voted from a later state, which it lost: it waits for a member that has it; if nobody has, the "
    "run's author can continue from this one with swarm-node run resume"
)

NO_SECOND_BEGINNING = (
    "trying again, since this member must not begin the run a second time; if the members that have the state are gone "
    "for good, restart this node to begin the run anew"
)


class OuterSteps:
    """Takes the member of `context` from one committed state to the next, until `run` has ended.

    `promises` and `evidence` outlive the process; they are None if this member keeps none. `announce` publishes the
    member's record again. Call `open` before anything else.
    """

    def __init__(
        self,
        context: RunContext,
        intervals: Intervals,
        held_out: HeldOutLoss,
        membership: Membership,
        *,
        promises: PromiseFile | None,
        evidence: EvidenceFolder | None,
        reports: MemberReports,
        announce: Callable[[], None],
    ) -> None:
        self.context = context
        self._audits = IntervalAudits(
            context,
            intervals,
            convict=lambda evidence: self.convictions.take(evidence, context.network.peer_id),
            is_banned=lambda peer: peer in self.convictions.peers,
            on_event=reports.on_event,
        )
        self.convictions = Convictions(context, self._on_convicted, evidence, self._audits.accuse)
        self.service = RoundService(context, self.convictions)
        self.interval_loop: IntervalLoop | None = None
        """Runs this member's intervals; None before `run`."""
        self.report: RoundReport | None = None
        """The measurements of the newest committed round that this member took part in."""
        self._stopping = asyncio.Event()
        self._intervals = intervals
        self._held_out = held_out
        self._membership = membership
        self._promises = promises
        self._reports = reports
        self._announce = announce
        self._effects = HeldOutEffects(context, intervals)
        self._watch = MembersWatch(membership, random.Random(context.network.peer_id), self._tell_others)
        self._promise: Promise | None = None
        self._accused: dict[str, str] = {}
        self._num_idle = 0
        self._lacking: Proof | None = None  # of a state that this member tries to get, as it has none of its own
        self._lacks_since = 0.0

    @property
    def latest(self) -> IntervalResult | None:
        """The result of the last interval that trained."""
        return self.interval_loop.latest if self.interval_loop else None

    @property
    def waiting(self) -> Waiting | None:
        """The peers that this member waits for, after its interval or for its first state; None while it trains."""
        if self._lacking is not None:
            return Waiting(peers=self._lacking.voters, seconds=asyncio.get_running_loop().time() - self._lacks_since)
        return self.service.driver.waiting if self.service.driver else None

    async def open(self) -> None:
        """Read this member's promise and convictions from disk, and start to answer peers."""
        self._promise = await recall_promise(self.context, self._promises)
        await self.convictions.recall()
        await self.service.open()

    async def run(self, background: asyncio.TaskGroup) -> None:
        """Take one step after the other until the last one is committed, or this member has left."""
        replica = self.context.replica
        intervals = self.interval_loop = IntervalLoop(
            self.context,
            self._intervals,
            tasks=background,
            on_event=self._reports.on_event,
            audits=self._audits,
            effects=self._effects,
        )
        intervals.begin()
        while replica.outer_step < replica.config.outer_steps and not (self._stopping.is_set() and self._has_left()):
            if await self._take_step(intervals, background):
                break
        intervals.end()
        if replica.outer_step < replica.config.outer_steps:
            self.service.close()  # others must not wait for this member to coordinate a later attempt

    def stop(self) -> None:
        """Leave with the current step, or with the next one."""
        self._stopping.set()
        self._intervals.leave()
        if self.service.driver is not None:
            self.service.driver.leave()

    def close(self) -> None:
        """Stop answering peers."""
        self.service.close()
        self.convictions.close()

    async def move_to(self, proof: Proof, records: Mapping[str, TrainerRecord]) -> SyncResult | None:
        """Adopt the state that `proof` certifies, or a later one: this member's own proposal, or else a copy fetched
        from others. Return None if neither can be had."""
        context, started = self.context, asyncio.get_running_loop().time()
        self._lacks_since, is_alone = started, not context.replica.roster
        fetching = fetch_state(context, self._membership, proof, records, self._on_lacking)
        try:
            # nobody waits for a member whose state has no roster
            reached = await (unless(self._stopping, fetching) if is_alone else fetching)
        except SwarmError as error:
            self._not_fetched(proof, error, f"going on from outer step {context.replica.outer_step}")
            return None
        finally:
            self._lacking = None
        if reached is None:
            return None
        context.replica.adopt(reached.state, reached.proof)
        self._reports.probation(context.replica)
        if (fetched := reached.fetched) is not None:
            self._reports.on_event(
                StateFetched(
                    step=reached.proof.outer_step,
                    digest=reached.state.digest.hex(),
                    donors=fetched.donors,
                    num_bytes=fetched.num_bytes,
                    seconds=asyncio.get_running_loop().time() - started,
                )
            )
        return reached

    def _on_lacking(self, proof: Proof, error: SwarmError) -> None:
        """Note that this member waits for its first state, and report that once."""
        if self._lacking is None:
            self._not_fetched(proof, error, NO_SECOND_BEGINNING)
        self._lacking = proof

    def _not_fetched(self, proof: Proof, error: SwarmError, then: str) -> None:
        silent = (error.peer_id,) if isinstance(error, PeerTimeout | PeerUnreachable) else ()
        reason = f"it was committed, but {error.message}; {then}"
        self._reports.aborted(GiveUp(step=proof.origin.step, attempt=proof.attempt, reason=reason, missing=silent))

    async def _take_step(self, intervals: IntervalLoop, background: asyncio.TaskGroup) -> bool:
        """Go from one committed state to the next one, while the intervals run. Return whether this member has left
        instead."""
        context = self.context
        for peer in await self.convictions.lapse():
            self._accused.pop(peer, None)
        start, driver = self._audits.begins_at(), self._driver(intervals, background)
        setup = driver.setup
        certificate = await self._drive(driver)
        if not certificate:
            return True
        proof = await context.check(certificate)
        if (late := contribution_late(context, setup, driver.state.mine, proof, driver.waits_s)) is not None:
            self._reports.late(late)
        if not proof.is_order and (proposal := context.replica.proposal(proof.outcome)) is not None:
            intervals.drop_offers(proposal.manifest.outer_step)  # frees memory before the new state takes some
        reached = await self.move_to(proof, {})
        await settle(context, setup, reached.proof if reached else None)
        await context.failpoints.reached("round.applied")
        driver.log.enter(None, asyncio.get_running_loop().time())
        if reached is None:
            if context.replica.digest != setup.state_digest:
                intervals.adopted(fetched=True)  # it adopted a state part of the way
            return False
        origin = reached.proof.origin
        if start is not None and origin.state_digest == setup.state_digest and origin.num_tokens:
            self._audits.keep_step(reached.proof, start, driver.reductions.drawn)
        self._effects.measure_soon(start, driver.reductions.measurable, background)
        driver.reductions.measurable = None  # takes 4 bytes per value, and only garbage collection frees the driver
        if reached.fetched is None:
            self._report_step(driver, reached.proof, intervals.latest)
        self._reports.scores(context.replica)
        if reached.proof.outer_step == setup.step and not self._stopping.is_set():
            self._held_out.soon(reached.state, background)
        intervals.adopted(fetched=reached.fetched is not None)
        self._announce()
        self._count_idle(reached.proof, setup.roster)
        return False

    def _driver(self, intervals: IntervalLoop, background: asyncio.TaskGroup) -> RoundDriver:
        """Return the driver of the next step, which begins now."""
        state = state_machine.begin(
            setup_of(self.context, self.convictions.peers),
            accused=self._accused,
            convicted=self.convictions.peers,
            promise=self._promise,
            interval_s=intervals.interval_s,
            began_at=asyncio.get_running_loop().time(),
        )
        return RoundDriver(
            context=self.context,
            state=state,
            intervals=intervals,
            convictions=self.convictions,
            promises=self._promises,
            background=background,
            on_abort=self._reports.aborted,
            # after an idle round, the next one is probably idle, too
            rest_s=rest_after(self._num_idle) if self._num_idle else 0.0,
        )

    async def _drive(self, driver: RoundDriver) -> bytes:
        """Run `driver`, let it answer peers, and watch the membership. Return what `RoundDriver.run` does."""
        if driver.state.abstains:
            setup = driver.setup
            self._reports.aborted(GiveUp(step=setup.step, attempt=setup.first_attempt, reason=STATE_LOST))
        async with asyncio.TaskGroup() as tasks:
            self.service.set_driver(driver)
            watch = tasks.create_task(self._watch.run(driver), name="watch")
            try:
                if certificate := await driver.run():
                    await self.context.failpoints.reached("round.committed")
            finally:
                self.service.set_driver(None)
                watch.cancel()
        self._accused = dict(driver.state.faults.accused)
        if not driver.state.abstains:
            self._promise = promise_of(driver.state)
        return certificate

    def _report_step(self, driver: RoundDriver, proof: Proof, latest: IntervalResult | None) -> None:
        now, bytes_sent = asyncio.get_running_loop().time(), driver.log.bytes_sent
        round_s = now - driver.offer.made_at if driver.offer else 0.0
        if proof.origin.num_tokens:
            self.report = driver.log.report(proof.origin.step, self.context.meter.latest_rates)
        self._reports.on_event(
            event_of_commit(proof, latest, bytes_sent=bytes_sent, seconds=now - driver.state.began_at, round_s=round_s)
        )

    def _count_idle(self, proof: Proof, roster: tuple[str, ...]) -> None:
        """Count consecutive rounds in which nobody trained and nobody was admitted, as when training fails for all."""
        is_idle = not proof.origin.num_tokens and not proof.is_order and self.context.replica.roster == roster
        self._num_idle = self._num_idle + 1 if is_idle else 0

    def _has_left(self) -> bool:
        """Return whether the other members go on without this one."""
        replica = self.context.replica
        me, proof = self.context.network.peer_id, replica.proof
        left = any(member.peer_id == me and member.leaving for member in proof.origin.members) if proof else False
        is_follower = me in replica.clusters().dealt
        return left or (me not in replica.roster and not is_follower)

    def _on_convicted(self, ban: Ban) -> None:
        verdict = ban.verdict
        self._reports.convicted(ban)
        if self.service.driver is not None:
            reason = f"{short_id(verdict.peer_id)}: {verdict.reason}"
            self.service.driver.feed(Convicted(peer=verdict.peer_id, reason=reason))

    def _tell_others(self) -> None:
        """Report what others have shown: another history of the run, or its author's endorsement."""
        self._reports.apart(self.context)
        if self._reports.endorsed(self.context):
            self._announce()
