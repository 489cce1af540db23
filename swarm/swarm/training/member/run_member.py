"""A member of a training run, from joining to the last outer step: the owner of its tasks and of its parts.

One task drives one step at a time (`round_driver`). Beside it the intervals run in a thread of their own
(`interval_loop`), and the other members are watched (`members_watch`). The `replica` holds what is committed,
`round_service` answers peers, and `progress_reports` tells events.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar

from swarm_compression import get_codec
from swarm_protocol.commit_messages import Endorsement
from swarm_protocol.errors import ConfigError, PeerTimeout, PeerUnreachable, SwarmError, cause
from swarm_protocol.identity import Identity
from swarm_protocol.records import RoundReport, TrainerRecord, TrainerState
from swarm_protocol.run_credentials import RunCredential, RunInvitation, credential_of, grant_of

from swarm.network.interface import FaultHook, Network, no_faults
from swarm.network.membership import Membership
from swarm.training.allreduce.parts import Residuals
from swarm.training.allreduce.peer_connections import BandwidthMeter
from swarm.training.evidence.bans import Ban
from swarm.training.evidence.convictions import Convictions
from swarm.training.evidence.evidence_folder import EvidenceStore
from swarm.training.evidence.interval_audits import IntervalAudits
from swarm.training.evidence.wrong_interval import IntervalCase
from swarm.training.inner.interval import HeldOutLoss, Intervals, TrainingSetup
from swarm.training.member.held_out_effects import HeldOutEffects
from swarm.training.member.interval_loop import IntervalLoop
from swarm.training.member.members_watch import WATCH_S, MembersWatch
from swarm.training.member.progress_reports import MemberReports, committed, scores_of, trainer_record
from swarm.training.member.reductions import settle
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.round_service import RoundService
from swarm.training.round import state_machine
from swarm.training.round.group_checks import num_demotable
from swarm.training.round.promise import Promise, PromiseStore
from swarm.training.round.round_events import Convicted, GiveUp
from swarm.training.round.round_state import rest_after
from swarm.training.run.methods import Methods, short
from swarm.training.run.run_copy import serve_run
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.ancestry import seek_endorsement
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import Proof, whom_to_ask
from swarm.training.state.endorsement import Endorsements, EndorsementStore
from swarm.training.state.genesis import check_genesis
from swarm.training.state.replica import HashedState, Replica
from swarm.training.state.replica_state import ReplicaState
from swarm.training.state.run_context import RunContext, recall_promise, setup_of
from swarm.training.state.state_download import ChunkStore
from swarm.training.state.state_sync import SyncResult, claims_of, furthest, reach, trainers
from swarm.training.state.state_transfer import Fetcher
from swarm.training.trainer_events import (
    HeldOutMeasured,
    StateFetched,
    TrainingEvent,
    Waiting,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

STATE_LOST = (
    "this member has voted from a later state, which it lost: it waits for a member that has it; if nobody has, the "
    "run's author can continue from this one with swarm-node run resume"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunMemberOptions:
    """Options of this member alone.

    `setup` is what it trains with (`interval.prepare`); `RunMember.close` closes their inner loop.
    `max_interval_s` by `clock` bounds its intervals beyond what the run says, so that a slow machine contributes what
    it can. `state` is the state to resume from, with the `certificate` that proved it, if there is one. Without
    `promises`, a member that is started again with the same key could vote twice for one step; without `evidence`, it
    has forgotten whom it convicted. With `invitations` or vouches it may enter the run at once. `endorsements` keeps
    the author's newest endorsement. `max_bytes_per_s` is what its owner lets it send or receive, whichever is less.
    """

    setup: TrainingSetup
    max_interval_s: float = math.inf
    clock: Callable[[], float] = time.monotonic
    state: ReplicaState | None = None
    certificate: bytes = b""
    chunks: ChunkStore | None = None
    promises: PromiseStore | None = None
    evidence: EvidenceStore | None = None
    endorsements: EndorsementStore | None = None
    invitations: tuple[RunInvitation, ...] = ()
    max_bytes_per_s: float = math.inf


class RunMember:
    """One member of `run`. `on_event` is called in the event loop, and must not block.

    `run` takes part until all outer steps are committed. The state is then served to members that are late, until
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
        self._signatures = RunSignatures.of_run(run, identity, network.network_id)
        self._run = run
        self._on_event = on_event
        theta_N = options.setup.take_weights()  # also where a state replaces them
        self._start: ReplicaState | None = options.state or ReplicaState.initial(theta_N, run.config.overlap_steps)
        setup = replace(options.setup, bring=None) if options.state else options.setup
        self._options = replace(options, setup=setup, state=None)  # nothing but `_start` keeps the state
        self._faults = faults
        self._meter = BandwidthMeter(options.max_bytes_per_s)
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="swarm-round")
        max_interval_s = min(options.max_interval_s, run.config.interval_s or math.inf)
        self._intervals = Intervals(options.setup.inner, max_interval_s=max_interval_s, clock=options.clock)
        self._held_out = HeldOutLoss(run.config, self._intervals, self._on_held_out)
        self._interval_loop: IntervalLoop | None = None
        self._convictions: Convictions | None = None
        self._audits: IntervalAudits | None = None
        self._effects: HeldOutEffects | None = None
        self._driver: RoundDriver | None = None
        self._service: RoundService | None = None
        self._replica: Replica | None = None
        self._accused: dict[str, str] = {}
        self._promise: Promise | None = None
        self._endorsements = Endorsements(options.endorsements)
        self._reports = MemberReports(network.peer_id, on_event)
        self._report: RoundReport | None = None
        self._stopping = self._has_gone = False
        self._num_idle = 0
        self._watch = MembersWatch(membership, random.Random(network.peer_id), self._tell_endorsement)

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
        """The proof that `state` was committed; empty for a run's initial state."""
        return self._replica.standing().certificate if self._replica else b""

    @property
    def digest(self) -> bytes:
        """The digest of `state`, as it was committed."""
        return self._replica.digest if self._replica else b""

    @property
    def num_mismatches(self) -> int:
        """The number of states that this member computed otherwise than the run, see `Replica`."""
        return self._replica.num_mismatches if self._replica else 0

    @property
    def bans(self) -> tuple[Ban, ...]:
        """The bans that this member obeys in the next round, newest last."""
        return self._convictions.bans if self._convictions else ()

    @property
    def held_out_scores(self) -> dict[str, float]:
        """The trainers' scores in the committed state, in nats, by peer."""
        return scores_of(self._replica) if self._replica else {}

    @property
    def waiting(self) -> Waiting | None:
        """The peers that this member waits for, once its interval has ended; None while it trains."""
        return self._driver.waiting if self._driver else None

    @property
    def report(self) -> RoundReport | None:
        """Return what this member measured of the newest committed round with it; set before `OuterStep`."""
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
        # not in the handler, which would replace the failure's own context
        raise failure

    async def _take_part(self) -> None:
        self._check_admitted()
        self._announce("joining")
        context = await self._open_context()
        async with asyncio.TaskGroup() as background:
            await self._join(context, background)
            if context.replica.outer_step == 0:
                await self._held_out.now(context.replica.current.state)
            self._interval_loop = IntervalLoop(
                context,
                self._intervals,
                tasks=background,
                on_event=self._on_event,
                audits=self._audits,
                effects=self._effects,
                is_leaving=self._stopping,
            )
            self._interval_loop.begin()
            last_step = self._run.config.outer_steps
            while context.replica.outer_step < last_step and not (self._stopping and self._has_left()):
                await self._take_step(context, background)
            self._interval_loop.end()
        if not self._stopping:
            await self._held_out.now(context.replica.current.state)
            self._announce("finished")

    def stop(self) -> None:
        """Leave with the step that is under way, or with the next one. The others then do not wait for this member. If
        they do not wait for it anyway, or are gone themselves, it leaves at once."""
        self._stopping = True
        if self._interval_loop is not None:
            self._interval_loop.leave()
        if self._driver is not None:
            self._driver.leave()

    def between_intervals(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` in the thread that trains, after its current work. If `on_event` calls this, `function` runs
        before the thread takes in what has been committed."""
        return self._intervals.between(function)

    async def close(self) -> None:
        """Stop serving peers. Waits for a running inner step. A second call does nothing."""
        self._leave()
        await asyncio.to_thread(self._intervals.close)
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    def _leave(self) -> None:
        if self._service is not None:
            self._service.close()
        if self._convictions is not None:
            self._convictions.close()
        self._membership.withdraw("train", self._run.run_id)

    def _check_admitted(self) -> None:
        admission = self._run.config.only_named
        if admission and self._network.peer_id not in admission:
            raise ConfigError(
                f"{self._run.config.name} admits only the peers that it names, and not {self._network.peer_id}",
                remedy="ask its author to name this peer, and to sign the run anew",
            )

    def _credential(self) -> RunCredential | None:
        """Return what this member shows where it enters the run. Raises ConfigError if it was given an invitation to
        another run or for another node."""
        given, now = self._options.invitations, self._network.now()
        if not given:
            return None
        network_id = self._network.network_id
        credential = credential_of(given, self._network.peer_id, self._run.run_id, network_id=network_id, now=now)
        if credential is None:
            logger.warning("the invitation to %s has expired: going on without it", self._run.run_id)
        else:
            self._signatures.check_credentials((credential,), now)
            self._reports.grant = grant_of(credential)
        return credential

    # --- joining -----------------------------------------------------------------------------------------------------

    async def _open_context(self) -> RunContext:
        """Make the replica and what rounds need of this member, and answer peers from now on."""
        config, options = self._run.config, self._options
        start, self._start = self._start, None
        assert start is not None
        held = await asyncio.get_running_loop().run_in_executor(self._executor, HashedState.of, start)
        if options.setup.bring is None:
            check_genesis(held.manifest, config)
        proof = self._signatures.proof_of(held.digest, options.certificate, self._network.now())
        self._replica = Replica(config, held, proof, options.setup.bounds)
        methods, codec = Methods(self._run.run_id), get_codec(config.codec)
        await asyncio.to_thread(self._endorsements.recall, self._signatures, self._network.now())
        context = RunContext(
            network=self._network,
            signatures=self._signatures,
            methods=methods,
            replica=self._replica,
            codec=codec,
            fetcher=Fetcher(self._network, methods, self._executor, options.chunks),
            executor=self._executor,
            endorsements=self._endorsements,
            faults=self._faults,
            residuals=Residuals(codec) if config.error_feedback else None,
            credential=self._credential(),
            meter=self._meter,
        )
        self._promise = await recall_promise(context, options.promises)
        self._convictions = Convictions(context, self._on_convicted, options.evidence, self._on_accusation)
        self._audits = IntervalAudits(
            context,
            self._intervals,
            convict=self._on_wrong_interval,
            is_banned=lambda peer: self._convictions is not None and peer in self._convictions.peers,
            on_event=self._on_event,
        )
        self._effects = HeldOutEffects(context, self._intervals)
        await self._convictions.recall()
        self._service = RoundService(context, self._convictions)
        await self._service.open()
        await serve_run(self._network, self._run)
        return context

    async def _join(self, context: RunContext, background: asyncio.TaskGroup) -> None:
        """Get to where the run is. The run's checkpoint is loaded only where that is the run's start."""
        records = await trainers(self._membership, self._run.run_id)
        await seek_endorsement(context, records)
        proof = await furthest(context, claims_of(context, records))
        if proof is None and context.replica.is_new and context.endorsements.newest is not None:
            proof, records = await self._await_endorsed(context, context.endorsements.newest)
        if proof is not None and proof.rank > context.replica.rank:
            await self._reach(context, proof, records)
        if self._convictions is not None:
            members = whom_to_ask(claims_of(context, records), context.replica.roster, self._network.peer_id)
            background.create_task(self._convictions.ask(members), name="ask who is banned")
        bring = self._options.setup.bring
        if bring is not None and context.replica.proof is None:
            state = ReplicaState.initial(await asyncio.to_thread(bring), self._run.config.overlap_steps)
            held = await asyncio.get_running_loop().run_in_executor(self._executor, HashedState.of, state)
            check_genesis(held.manifest, self._run.config)
            context.replica.begin(held)
        self._reports.probation(context.replica)  # of one that is started anew, and finds nobody further
        self._announce("training")

    async def _await_endorsed(
        self, context: RunContext, endorsement: Endorsement
    ) -> tuple[Proof | None, dict[str, TrainerRecord]]:
        """Wait for a member that shows a state after `endorsement`: a newcomer does not begin such a run anew. Return
        None if this member is told to stop."""
        reason = f"no member shows a state that follows from outer step {endorsement.outer_step}, which the run's "
        reason += "author endorses: waiting for one"
        self._reports.aborted(GiveUp(step=endorsement.outer_step, attempt=0, reason=reason, missing=()))
        while True:
            await asyncio.sleep(WATCH_S)
            records = await trainers(self._membership, self._run.run_id)
            proof = await furthest(context, claims_of(context, records))
            if proof is not None or self._stopping:
                return proof, records

    async def _reach(
        self, context: RunContext, proof: Proof, records: Mapping[str, TrainerRecord]
    ) -> SyncResult | None:
        """Adopt the state that `proof` certifies, which this member has proposed or others have, or a later one. Return
        None if nobody has either any more."""
        started = asyncio.get_running_loop().time()
        try:
            if (own := await context.replica.own(self._executor, proof)) is not None:
                reached = SyncResult(proof=proof, held=own)
            else:
                reached = await reach(context, self._membership, proof, records)
        except SwarmError as error:
            silent = (error.peer_id,) if isinstance(error, PeerTimeout | PeerUnreachable) else ()
            reason = f"it was committed, but {error.message}; going on from outer step {context.replica.outer_step}"
            self._reports.aborted(GiveUp(step=proof.origin.step, attempt=proof.attempt, reason=reason, missing=silent))
            return None
        context.replica.adopt(reached.held, reached.proof)
        self._reports.probation(context.replica)
        if (fetched := reached.fetched) is not None:
            self._on_event(
                StateFetched(
                    step=reached.proof.outer_step,
                    digest=reached.held.digest.hex(),
                    donors=fetched.donors,
                    num_bytes=fetched.num_bytes,
                    seconds=asyncio.get_running_loop().time() - started,
                )
            )
        return reached

    # --- one step ----------------------------------------------------------------------------------------------------

    async def _take_step(self, context: RunContext, background: asyncio.TaskGroup) -> None:
        """Go from one committed state to the next one, while the intervals run."""
        intervals, convictions, audits, effects = self._interval_loop, self._convictions, self._audits, self._effects
        assert intervals is not None
        assert convictions is not None
        assert audits is not None
        assert effects is not None
        for peer in await convictions.lapse():
            self._accused.pop(peer, None)
        started, before = asyncio.get_running_loop().time(), context.replica.digest
        setup = setup_of(context)
        setup = replace(setup, demoted=setup.standings.to_demote(convictions.peers)[: num_demotable(setup.max_group)])
        start, begins_at = audits.begins_at(), effects.begins_at()
        driver = RoundDriver(
            context,
            state_machine.begin(
                setup,
                accused=self._accused,
                convicted=convictions.peers,
                promise=self._promise,
                interval_s=intervals.interval_s,
                began_at=started,
            ),
            intervals,
            convictions=convictions,
            promises=self._options.promises,
            background=background,
            on_abort=self._reports.aborted,
            # after an idle round, another one like it is all that is to be expected
            rest_s=rest_after(self._num_idle) if self._num_idle else 0.0,
        )
        certificate = await self._drive(driver, context)
        if not certificate:
            self._has_gone = True
            return
        proof = await context.check(certificate)
        if (late := driver.lost(proof)) is not None:
            self._reports.late(late)
        if not proof.is_order and (proposal := context.replica.proposal(proof.outcome)) is not None:
            intervals.drop_offers(proposal.manifest.outer_step)  # before the new state takes memory
        reached = await self._reach(context, proof, {})
        await settle(context, setup, reached.proof if reached else None)
        await self._faults.reached("round.applied")
        driver.log.enter(None, asyncio.get_running_loop().time())
        if reached is not None:
            origin = reached.proof.origin
            if start is not None and (origin.state_digest, bool(origin.num_tokens)) == (before, True):
                audits.committed(reached.proof, start, driver.drawn)
            effects.measure_soon(begins_at, driver.measurable, background)
            driver.measurable = None  # it has 4 bytes a value, and only a garbage collection frees the driver
            if reached.fetched is None:
                self._report_step(driver, reached.proof, started)
            self._reports.scores(context.replica)
            if reached.proof.outer_step == setup.step and not self._stopping:
                self._held_out.soon(reached.held.state, background)
            intervals.adopted(fetched=reached.fetched is not None)
            self._announce("training")
            self._count_idle(reached.proof, setup.roster)
        elif context.replica.digest != before:
            intervals.adopted(fetched=True)  # it has come part of the way

    async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
        """Run `driver`, answer peers by it, and watch the membership. Return what `RoundDriver.run` does."""
        assert self._service is not None
        if driver.abstains:
            setup = driver.setup
            self._reports.aborted(GiveUp(step=setup.step, attempt=setup.first_attempt, reason=STATE_LOST, missing=()))
        async with asyncio.TaskGroup() as tasks:
            self._service.set_driver(driver)
            self._driver = driver
            interval_s = self._interval_loop.interval_s if self._interval_loop else 0.0
            watch = tasks.create_task(self._watch.run(driver, context, interval_s), name="watch")
            try:
                if certificate := await driver.run():
                    await self._faults.reached("round.committed")
            finally:
                self._service.set_driver(None)
                self._driver = None
                watch.cancel()
        self._accused = driver.accused
        if not driver.abstains:
            self._promise = driver.promise
        return certificate

    def _report_step(self, driver: RoundDriver, proof: Proof, started: float) -> None:
        assert self._interval_loop is not None
        now, bytes_sent = asyncio.get_running_loop().time(), driver.bytes_sent
        round_s = now - driver.offer.made_at if driver.offer else 0.0
        if proof.origin.num_tokens:
            self._report = driver.log.report(proof.origin.step, bytes_sent, self._meter.latest_rates)
        self._on_event(
            committed(proof, self._interval_loop.latest, bytes_sent=bytes_sent, seconds=now - started, round_s=round_s)
        )

    def _count_idle(self, proof: Proof, roster: tuple[str, ...]) -> None:
        """Count rounds in which nobody trained, as when training fails for all, and nobody was admitted."""
        assert self._replica is not None
        is_idle = not proof.origin.num_tokens and not proof.is_order and self._replica.roster == roster
        self._num_idle = self._num_idle + 1 if is_idle else 0

    def _has_left(self) -> bool:
        """Return whether the state's other members go on without this one."""
        if self._has_gone:
            return True
        assert self._replica is not None
        me, proof = self._network.peer_id, self._replica.proof
        left = any(member.peer_id == me and member.leaving for member in proof.origin.members) if proof else False
        is_follower = me in self._replica.clusters().dealt
        return left or (me not in self._replica.roster and not is_follower)

    # --- reports -----------------------------------------------------------------------------------------------------

    def _on_convicted(self, ban: Ban) -> None:
        verdict = ban.verdict
        self._accused = {**self._accused, verdict.peer_id: verdict.reason}
        self._reports.convicted(ban)
        if self._driver is not None:
            self._driver.feed(Convicted(peer=verdict.peer_id, reason=f"{short(verdict.peer_id)}: {verdict.reason}"))

    def _tell_endorsement(self, context: RunContext) -> None:
        if self._reports.endorsed(context):
            self._announce("training")

    def _on_accusation(self, case: IntervalCase) -> None:
        if self._audits is not None:
            self._audits.accuse(case)

    async def _on_wrong_interval(self, evidence: bytes) -> None:
        if self._convictions is not None:
            await self._convictions.take(evidence, self._network.peer_id)

    def _on_held_out(self, step: int, loss: float) -> None:
        self._on_event(HeldOutMeasured(step=step, loss=loss))
        if self._interval_loop is not None:
            self._announce("training")

    def _announce(self, state: TrainerState) -> None:
        latest = self._interval_loop.latest if self._interval_loop else None
        newest = self._held_out.newest
        endorsement = self._endorsements.newest
        record = trainer_record(
            self._run.run_id, self._replica, latest, state, self._report, newest, endorsement=endorsement
        )
        self._membership.announce(record)
