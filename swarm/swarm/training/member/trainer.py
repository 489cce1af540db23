"""A member of a training run, from joining to the last outer step: the thin owner of tasks.

One task drives one step at a time (`driver`); beside it the intervals take their `course` in a thread of its own, and
the membership is watched. What is committed lies in the `replica`; what peers ask goes to the `desk`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar

from swarm_compression import get_codec
from swarm_protocol.errors import ConfigError, PeerTimeout, PeerUnreachable, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.records import RoundReport, TrainerRecord, TrainerState

from swarm.network.failpoints import FaultHook, no_faults
from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.training.allreduce.residuals import Residuals
from swarm.training.inner.interval import Intervals, Materials, Validating
from swarm.training.member.first_state import bring_weights, recall
from swarm.training.member.interval_loop import Course
from swarm.training.member.progress_reports import StepCost, aborted, committed, record, state_fetched
from swarm.training.member.root_cause import cause
from swarm.training.member.trainer_events import ContributionLate, TrainingEvent, Validated
from swarm.training.member.waiting import Waiting
from swarm.training.round import state_machine
from swarm.training.round.certificate import Notary, Proof
from swarm.training.round.claims import whom_to_ask
from swarm.training.round.methods import Methods
from swarm.training.round.promise import Promise, PromiseStore
from swarm.training.round.round_context import Seat, settle, terms_of
from swarm.training.round.round_driver import RoundDriver
from swarm.training.round.round_events import GiveUp, Offered, Proven
from swarm.training.round.round_service import Desk
from swarm.training.round.round_state import rest_after
from swarm.training.run.run_copy import serve_run
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.replica import Held, Replica
from swarm.training.state.replica_state import ReplicaState
from swarm.training.state.state_download import NO_STORE, ChunkStore
from swarm.training.state.state_sync import Reached, claims_of, furthest, reach, trainers
from swarm.training.state.state_transfer import Fetcher

T = TypeVar("T")

logger = logging.getLogger(__name__)

WATCH_S = 5.0
FIRST_WATCH_S = 0.5
"""How often the membership is looked at: often while a run's first group forms, as nothing else says who is there."""
STATE_LOST = (
    "this member has voted from a later state, which it lost: it waits for a member that has it; if nobody has, the "
    "run's author can continue from this one with swarm-node run resume"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunMemberOptions:
    """What concerns this member alone.

    `materials` are what it trains with (`interval.prepare`); `RunMember.close` closes their inner loop.
    `max_interval_s` by `clock` bounds its intervals beyond what the run says, so that a slow machine contributes what
    it can. `state` is one to resume from, with the `certificate` that proved it where there is one. Without `promises`,
    a member that is started again with the same key could vote twice for one step.
    """

    materials: Materials
    max_interval_s: float = math.inf
    clock: Callable[[], float] = time.monotonic
    state: ReplicaState | None = None
    certificate: bytes = b""
    chunks: ChunkStore = NO_STORE
    promises: PromiseStore | None = None


class RunMember:
    """One member of `run`. `on_event` is called in the event loop, and must not block.

    `run` takes part until all outer steps are committed; the state is then handed out to those who are late, until
    `close`.
    """

    def __init__(
        self,
        network: Network,
        membership: Membership,
        identity: Identity,
        run: SignedRun,
        *,
        on_event: Callable[[TrainingEvent], None],
        options: RunMemberOptions,
        faults: FaultHook = no_faults,
    ) -> None:
        self._network = network
        self._membership = membership
        self._notary = Notary.of_run(run, identity, network.network_id)
        self._run = run
        self._on_event = on_event
        start = options.state or ReplicaState.initial(options.materials.take_weights(), run.config.overlap_steps)
        self._start: ReplicaState | None = start
        self._bring = None if options.state else options.materials.bring
        self._certificate = options.certificate
        self._bounds = options.materials.bounds
        self._chunks = options.chunks
        self._promises = options.promises
        self._faults = faults
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="swarm-round")
        max_interval_s = min(options.max_interval_s, run.config.interval_s or math.inf)
        self._intervals = Intervals(options.materials.inner, max_interval_s=max_interval_s, clock=options.clock)
        self._validating = Validating(run.config, self._intervals, self._on_validated)
        self._course: Course | None = None
        self._driver: RoundDriver | None = None
        self._desk: Desk | None = None
        self._replica: Replica | None = None
        self._accused: dict[str, str] = {}
        self._promise: Promise | None = None
        self._report: RoundReport | None = None
        self._stopping = False
        self._num_idle = 0

    async def __aenter__(self) -> RunMember:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def state(self) -> ReplicaState | None:
        """The committed state; its tensors do not change. None before `run` has prepared it."""
        return self._replica.current.state if self._replica else None

    @property
    def certificate(self) -> bytes:
        """What proves that `state` was committed; empty for a run's initial state."""
        return self._replica.standing().certificate if self._replica else b""

    @property
    def digest(self) -> bytes:
        """The name of `state`, as it was committed."""
        return self._replica.digest if self._replica else b""

    @property
    def num_mismatches(self) -> int:
        """See `Replica`."""
        return self._replica.num_mismatches if self._replica else 0

    @property
    def waiting(self) -> Waiting | None:
        """For whom this member waits, now that its interval has ended; None: it trains."""
        return self._driver.waiting if self._driver else None

    @property
    def report(self) -> RoundReport | None:
        """What this member measured of the newest committed round that it was there for; set before `OuterStep`."""
        return self._report

    async def run(self) -> None:
        """Join, and train until all outer steps are committed or `stop`.

        Raises ConfigError, also if the run does not admit this peer, IntegrityError, and what the inner loop raises,
        as it was raised. The others then do not wait for this member.
        """
        try:
            await self._take_part()
            return
        except BaseException as error:  # cancelled, too
            self._leave()
            failure = cause(error)
        # not in the handler: what the failure itself came from stays to be seen
        raise failure

    async def _take_part(self) -> None:
        self._check_admitted()
        self._announce("joining")
        seat = await self._take_seat()
        async with asyncio.TaskGroup() as background:
            await self._join(seat)
            if seat.replica.outer_step == 0:
                await self._validating.now(seat.replica.current.state)
            self._course = self._begin_course(seat, background)
            while seat.replica.outer_step < self._run.config.outer_steps and not (self._stopping and self._has_left()):
                await self._take_step(seat, background)
            self._course.end()
        if not self._stopping:
            await self._validating.now(seat.replica.current.state)
            self._announce("finished")

    def stop(self) -> None:
        """Leave with the step that is under way, or with the next one: the others are not to wait for this member."""
        self._stopping = True
        if self._course is not None:
            self._course.leave()

    def between_intervals(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` in the thread that trains, after what it is at: asked for from `on_event`, before it takes
        in what has been committed."""
        return self._intervals.between(function)

    async def close(self) -> None:
        """Hand out nothing more. Waits for a running inner step. Idempotent."""
        self._leave()
        await asyncio.to_thread(self._intervals.close)
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    def _leave(self) -> None:
        if self._desk is not None:
            self._desk.close()
        self._membership.withdraw("train", self._run.run_id)

    def _check_admitted(self) -> None:
        admission = self._run.config.admission
        if admission and self._network.peer_id not in admission:
            raise ConfigError(
                f"{self._run.config.name} admits only the peers that it names, and not {self._network.peer_id}",
                remedy="ask its author to name this peer, and to sign the run anew",
            )

    # --- joining -----------------------------------------------------------------------------------------------------

    async def _take_seat(self) -> Seat:
        config = self._run.config
        loop = asyncio.get_running_loop()
        start, self._start = self._start, None
        assert start is not None
        held = await loop.run_in_executor(self._executor, Held.of, start)
        proof = self._notary.proof_of(held.digest, self._certificate, self._network.now())
        self._replica = Replica(config, held, proof, self._bounds)
        methods = Methods(self._run.run_id)
        codec = get_codec(config.codec)
        seat = Seat(
            network=self._network,
            notary=self._notary,
            methods=methods,
            replica=self._replica,
            codec=codec,
            fetcher=Fetcher(self._network, methods, self._executor, self._chunks),
            executor=self._executor,
            faults=self._faults,
            residuals=Residuals(codec) if config.error_feedback else None,
            promises=self._promises,
        )
        self._promise = await recall(seat)
        self._desk = Desk(seat)
        await self._desk.open()
        await serve_run(self._network, self._run)
        return seat

    async def _join(self, seat: Seat) -> None:
        """Get to where the run is. The run's checkpoint is brought only where that is the run's start."""
        records = await trainers(self._membership, self._run.run_id)
        proof = await furthest(seat, claims_of(seat, records))
        if proof is not None and proof.rank > seat.replica.rank:
            await self._reach(seat, proof, records)
        if self._bring is not None and seat.replica.proof is None:
            await bring_weights(seat, self._bring)
        self._bring = None
        self._announce("training")

    async def _reach(self, seat: Seat, proof: Proof, records: Mapping[str, TrainerRecord]) -> Reached | None:
        """Adopt the state that `proof` is about, or a later one. None if nobody has either any more."""
        started = asyncio.get_running_loop().time()
        try:
            reached = await reach(seat, self._membership, proof, records)
        except SwarmError as error:
            silent = (error.peer_id,) if isinstance(error, PeerTimeout | PeerUnreachable) else ()
            reason = f"it was committed, but {error.message}; going on from outer step {seat.replica.outer_step}"
            self._on_abort(GiveUp(step=proof.origin.step, attempt=proof.attempt, reason=reason, missing=silent))
            return None
        seat.replica.adopt(reached.held, reached.proof)
        if reached.fetched is not None:
            self._on_event(state_fetched(reached, asyncio.get_running_loop().time() - started))
        return reached

    def _begin_course(self, seat: Seat, tasks: asyncio.TaskGroup) -> Course:
        course = Course(seat, self._intervals, tasks=tasks, on_event=self._on_event, is_leaving=self._stopping)
        course.begin()
        return course

    # --- one step ----------------------------------------------------------------------------------------------------

    async def _take_step(self, seat: Seat, background: asyncio.TaskGroup) -> None:
        """From one committed state to the next one, while the intervals take their course."""
        assert self._desk is not None
        assert self._course is not None
        loop, course = asyncio.get_running_loop(), self._course
        started, terms = loop.time(), terms_of(seat)
        driver = RoundDriver(
            seat,
            state_machine.begin(
                terms,
                accused=self._accused,
                promise=self._promise,
                interval_s=course.interval_s,
                began_at=started,
            ),
            background=background,
            on_abort=self._on_abort,
            hurry=lambda: course.hurry(terms.step),
        )
        if driver.abstains:
            self._on_abort(GiveUp(step=terms.step, attempt=terms.first_attempt, reason=STATE_LOST, missing=()))
        async with asyncio.TaskGroup() as tasks:
            self._desk.enter(driver)
            self._driver = driver
            offering = tasks.create_task(self._offer(driver), name="offer")
            watch = tasks.create_task(self._watch(driver, seat), name="watch")
            try:
                certificate = await driver.run()
                await self._faults.reached("round.committed")
            finally:
                self._desk.enter(None)
                self._driver = None
                offering.cancel()
                watch.cancel()
        self._accused = driver.accused
        if not driver.abstains:
            self._promise = driver.promise
        before = seat.replica.digest
        proof = await seat.check(certificate)
        if (late := driver.lost(proof)) is not None:
            self._on_late(late)
        reached = await self._reach(seat, proof, {})
        await settle(seat, terms.step, reached.proof if reached else None)
        await self._faults.reached("round.applied")
        driver.log.enter(None, loop.time())
        if reached is None:
            if seat.replica.digest != before:
                # it has come part of the way
                course.adopted(fetched=True)
            return
        if reached.fetched is None:
            now = loop.time()
            round_s = 0.0 if offering.cancelled() else now - offering.result()
            cost = StepCost(bytes_sent=driver.bytes_sent, seconds=now - started, round_s=round_s)
            if reached.proof.origin.num_tokens:
                self._report = driver.log.report(reached.proof.origin.step, cost.bytes_sent)
            self._on_event(committed(reached.proof, cost, course.latest))
        if reached.proof.outer_step == terms.step and not self._stopping:
            self._validating.soon(reached.held.state, background)
        course.adopted(fetched=reached.fetched is not None)
        self._announce("training")
        self._count_idle(reached.proof, terms.roster)

    def _count_idle(self, proof: Proof, roster: tuple[str, ...]) -> None:
        """Rounds that changed nothing: nobody has trained, as when it fails for all, and nobody was admitted."""
        assert self._replica is not None
        is_idle = not proof.origin.num_tokens and not proof.is_order and self._replica.roster == roster
        self._num_idle = self._num_idle + 1 if is_idle else 0

    async def _offer(self, driver: RoundDriver) -> float:
        """Bring to the round what the step's interval has, once it has ended. When that was, by the loop's clock."""
        assert self._course is not None
        offer = await self._course.offer(driver.terms.step)
        if self._num_idle:  # another round like that is all that is to be expected
            await asyncio.sleep(rest_after(self._num_idle))
        driver.delta_F = offer.delta_F
        if offer.delta_F is not None:
            driver.log.add("interval", offer.interval_s)
        contribution = replace(offer.contribution, leaving=self._stopping)
        driver.feed(Offered(contribution=contribution, interval_s=offer.interval_s))
        return offer.made_at

    def _has_left(self) -> bool:
        """Whether the state's other members go on without this one."""
        assert self._replica is not None
        me, proof = self._network.peer_id, self._replica.proof
        left = any(member.peer_id == me and member.leaving for member in proof.origin.members) if proof else False
        return left or me not in self._replica.roster

    async def _watch(self, driver: RoundDriver, seat: Seat) -> None:
        """Look at others in the run: first those that seem to be further."""
        while True:
            records = await trainers(self._membership, self._run.run_id)
            present = {peer: each for peer, each in records.items() if each.state != "leaving"}
            claims = dict.fromkeys(driver.known, 0) | claims_of(seat, present)
            for peer in whom_to_ask(claims, driver.terms.roster, seat.network.peer_id):
                driver.look_at(peer)
            if seat.replica.is_new:
                proof = await furthest(seat, claims)
                if proof is not None and proof.rank > seat.replica.rank:
                    driver.feed(Proven(certificate=proof.certificate))
            await asyncio.sleep(WATCH_S if driver.terms.roster else FIRST_WATCH_S)

    # --- what others hear --------------------------------------------------------------------------------------------

    def _on_abort(self, notice: GiveUp) -> None:
        logger.warning("attempt %d at outer step %d: %s", notice.attempt, notice.step, notice.reason)
        self._on_event(aborted(notice))

    def _on_late(self, event: ContributionLate) -> None:
        when = "its interval still ran" if event.late_s is None else f"it was ready {event.late_s:.1f} s later"
        logger.warning("outer step %d was formed without this member's contribution: %s", event.step, when)
        self._on_event(event)

    def _on_validated(self, event: Validated) -> None:
        self._on_event(event)
        if self._course is not None:
            self._announce("training")

    def _announce(self, state: TrainerState) -> None:
        latest = self._course.latest if self._course else None
        self._membership.announce(
            record(self._run.run_id, self._replica, latest, state, self._report, self._validating.newest)
        )
