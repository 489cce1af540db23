"""Runs a member of a training run, from joining to the last outer step, and owns its tasks and components.

`outer_steps` takes it from one committed state to the next. The `replica` holds the committed state, `round_service`
answers peers, and `progress_reports` makes events.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
from swarm_compression import get_codec
from swarm_protocol.commit_messages import Endorsement
from swarm_protocol.errors import cause
from swarm_protocol.identity import Identity
from swarm_protocol.records import RoundReport, TrainerRecord, TrainerState
from swarm_protocol.run_credentials import RunCredential, RunInvitation, credential_of, grant_of
from torch import Tensor

from swarm.ended_tasks import unless
from swarm.evidence_folder import EvidenceFolder
from swarm.network.interface import FailpointHook, Network, no_failpoints
from swarm.network.membership import Membership
from swarm.threads import in_executor, in_own_thread
from swarm.training.allreduce.parts import Residuals
from swarm.training.allreduce.peer_connections import BandwidthMeter
from swarm.training.evidence.bans import Ban
from swarm.training.inner.interval import HeldOutLoss, Intervals, TrainingSetup
from swarm.training.member.members_watch import WATCH_S
from swarm.training.member.outer_steps import OuterSteps
from swarm.training.member.progress_reports import MemberReports, lowest_scores, scores_of
from swarm.training.round.promise import PromiseFile
from swarm.training.round.round_events import GiveUp
from swarm.training.run.methods import Methods
from swarm.training.run.run_copy import serve_run
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.ancestry import seek_endorsement
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import Proof, whom_to_ask
from swarm.training.state.endorsement import Endorsements
from swarm.training.state.replica import Replica
from swarm.training.state.replica_state import ReplicaState, check_genesis
from swarm.training.state.run_context import RunContext, recall_history
from swarm.training.state.state_download import ChunkFolder
from swarm.training.state.state_sync import claims_of, furthest, newest_shown, trainers
from swarm.training.state.state_transfer import Fetcher
from swarm.training.trainer_events import HeldOutMeasured, TrainingEvent, Waiting

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunMemberOptions:
    """Options of this member alone.

    `setup` is what the member trains with (`interval.prepare`); `RunMember.close` closes its inner loop. `clock`
    measures the intervals. `state` is the state to resume from, `certificate` its proof, and `history` those before it.
    Without `promises`, a member that is started again with the same key could vote twice for one step; without
    `evidence`, it forgets whom it convicted. `invitations` may let it enter the run at once. `endorsements` is the
    folder that keeps the author's newest endorsement. `max_bytes_per_s` is the limit that the node's operator set for
    sending or for receiving, whichever is less. `chance` draws the leaves that this member audits: other members must
    not be able to predict them, so only simulations set it.
    """

    setup: TrainingSetup
    clock: Callable[[], float] = time.monotonic
    state: ReplicaState | None = None
    certificate: bytes = b""
    history: tuple[bytes, ...] = ()
    chunks: ChunkFolder | None = None
    promises: PromiseFile | None = None
    evidence: EvidenceFolder | None = None
    endorsements: Path | None = None
    invitations: tuple[RunInvitation, ...] = ()
    max_bytes_per_s: float = math.inf
    chance: random.Random = field(default_factory=random.SystemRandom)

    def kept_in(self, votes: Path, evidence: Path, run: SignedRun, network_id: str) -> RunMemberOptions:
        """Return these options with the stores in two folders, which belong to `run` and one process."""
        return replace(
            self,
            promises=PromiseFile(votes),
            evidence=EvidenceFolder(evidence, run.text, network_id),
            endorsements=votes,
        )


class RunMember:
    """A member of `run`. `on_event` is called in the event loop, and must not block.

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
        failpoints: FailpointHook = no_failpoints,
    ) -> None:
        self._network = network
        self._membership = membership
        self._signatures = RunSignatures.of_run(run, identity, network.network_id)
        self._run = run
        self._on_event = on_event
        theta_N = options.setup.take_weights()  # even if a state replaces them
        self._start: ReplicaState | Tensor | None = options.state or theta_N
        setup = replace(options.setup, bring=None) if options.state else options.setup
        self._options = replace(options, setup=setup, state=None)  # only `_start` refers to the state
        self._failpoints = failpoints
        # denormal numbers count in a state's digest, and the program may have its threads flush them
        self._executor = ThreadPoolExecutor(2, "swarm-round", initializer=torch.set_flush_denormal, initargs=(False,))
        max_interval_s = run.config.interval_s or math.inf
        self._intervals = Intervals(options.setup.inner, max_interval_s=max_interval_s, clock=options.clock)
        self._held_out = HeldOutLoss(run.config, self._intervals, self._on_held_out)
        self._endorsements = Endorsements(options.endorsements)
        self._reports = MemberReports(network.peer_id, on_event)
        self._steps: OuterSteps | None = None  # set once it answers peers
        self._stopping = asyncio.Event()
        self.has_joined = False
        """True once this member has caught up with the run."""
        self.alone = ""
        """Says from where this member trains if it found no other one when it joined; empty if it found some."""

    async def __aenter__(self) -> RunMember:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def replica(self) -> Replica | None:
        """The committed state with its proof; None before `run` has prepared it."""
        return self._steps.context.replica if self._steps else None

    @property
    def state(self) -> ReplicaState | None:
        """The committed state; its tensors do not change. None before `run` has prepared it."""
        return self.replica.current if self.replica else None

    @property
    def certificate(self) -> bytes:
        """The proof that `state` was committed; empty for a run's initial state."""
        return self.replica.certificate if self.replica else b""

    @property
    def digest(self) -> bytes:
        """The digest of `state`, as it was committed."""
        return self.replica.digest if self.replica else b""

    @property
    def num_mismatches(self) -> int:
        """The number of states that this member computed differently from the run (see `Replica`)."""
        return self.replica.num_mismatches if self.replica else 0

    @property
    def bans(self) -> tuple[Ban, ...]:
        """The bans that this member obeys in the next round, newest last."""
        return self._steps.convictions.bans if self._steps else ()

    @property
    def held_out_scores(self) -> dict[str, float]:
        """The trainers' scores in the committed state, in nats, by peer."""
        return scores_of(self.replica) if self.replica else {}

    @property
    def waiting(self) -> Waiting | None:
        """The peers that this member waits for, once its interval has ended; None while it trains."""
        return self._steps.waiting if self._steps else None

    @property
    def is_watched(self) -> bool:
        """True while a peer that watches the run may soon ask for the newest state."""
        return self._steps is not None and self._steps.service.is_watched

    @property
    def report(self) -> RoundReport | None:
        """The measurements of the newest committed round that this member took part in; set before `OuterStep`."""
        return self._steps.report if self._steps else None

    async def run(self) -> None:
        """Join, and train until all outer steps are committed or `stop`.

        Raises ConfigError, also if the run does not admit this peer, and IntegrityError. Errors of the inner loop are
        raised unchanged. After an error the other members do not wait for this one.
        """
        try:
            await self._take_part()
            return
        except BaseException as error:  # cancelled, too
            self._leave()
            failure = cause(error)
        # outside the handler, which would replace the failure's own context
        raise failure

    async def _take_part(self) -> None:
        self._check_admitted()
        self._announce("joining")
        steps = await self._open()
        replica = steps.context.replica
        async with asyncio.TaskGroup() as background:
            if (members := await unless(self._stopping, self._join(steps))) is not None:
                asking = background.create_task(steps.convictions.ask(members), name="ask who is banned")
                if replica.outer_step == 0:
                    await self._held_out.now(replica.current)
                await steps.run(background)
                asking.cancel()
        if not self._stopping.is_set():
            await self._held_out.now(replica.current)
            self._announce("finished")

    def stop(self) -> None:
        """Leave with the current step, or with the next one. The others then do not wait for this member. If they do
        not wait for it anyway, are gone themselves, or it has not joined yet, it leaves at once."""
        self._stopping.set()
        if self._steps is not None:
            self._steps.stop()

    def between_intervals(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` in the training thread, after its current work. If `on_event` calls this method, `function`
        runs before the thread takes in the newly committed state."""
        return self._intervals.submit(function)

    async def close(self) -> None:
        """Stop serving peers. Waits for a running inner step. A second call does nothing."""
        self._leave()
        await asyncio.to_thread(self._intervals.close)
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    def _leave(self) -> None:
        self._intervals.leave()
        if self._steps is not None:
            self._steps.close()
        self._membership.withdraw("train", self._run.run_id)

    def _check_admitted(self) -> None:
        self._run.check_names(self._network.peer_id)

    def _credential(self) -> RunCredential | None:
        """Return the credential that this member shows when it enters the run, or None. Raises ConfigError if it was
        given an invitation to another run or for another node."""
        given, network, now = self._options.invitations, self._network, self._network.now()
        if not given:
            return None
        credential = credential_of(given, network.peer_id, self._run.run_id, network_id=network.network_id, now=now)
        if credential is None:
            logger.warning("the invitation to %s has expired: going on without it", self._run.run_id)
        else:
            self._signatures.check_credentials((credential,), now)
            self._reports.grant = grant_of(credential)
        return credential

    # --- joining -----------------------------------------------------------------------------------------------------

    async def _open_context(self) -> RunContext:
        """Make the replica, and the context that rounds need."""
        config, options = self._run.config, self._options
        start, self._start = self._start, None
        assert start is not None
        state = start if isinstance(start, ReplicaState) else await self._first_state(start)
        if options.setup.bring is None:
            check_genesis(state.manifest, config)
        proof = self._signatures.proof_of(state.digest, options.certificate, self._network.now())
        methods, codec = Methods(self._run.run_id), get_codec(config.codec)
        await asyncio.to_thread(self._endorsements.recall, self._signatures, self._network.now())
        return RunContext(
            network=self._network,
            signatures=self._signatures,
            methods=methods,
            replica=Replica(config, state, proof, options.setup.bounds),
            codec=codec,
            fetcher=Fetcher(self._network, methods, self._executor, options.chunks),
            executor=self._executor,
            endorsements=self._endorsements,
            failpoints=self._failpoints,
            residuals=Residuals(codec) if config.error_feedback else None,
            credential=self._credential(),
            meter=BandwidthMeter(options.max_bytes_per_s),
            chance=options.chance,
        )

    async def _first_state(self, theta_N: Tensor) -> ReplicaState:
        return await in_executor(self._executor, ReplicaState.initial, theta_N, self._run.config.overlap_steps)

    async def _open(self) -> OuterSteps:
        """Create the outer steps, and start to answer peers."""
        context, options = await self._open_context(), self._options
        await recall_history(context, options.history)
        steps = self._steps = OuterSteps(
            context,
            self._intervals,
            self._held_out,
            self._membership,
            promises=options.promises,
            evidence=options.evidence,
            reports=self._reports,
            announce=partial(self._announce, "training"),
        )
        if self._stopping.is_set():
            steps.stop()
        await steps.open()
        await serve_run(self._network, self._run)
        return steps

    async def _join(self, steps: OuterSteps) -> list[str]:
        """Catch up with the run, and return the members to ask for convicted ones. The run's checkpoint is loaded only
        if the run starts from it here."""
        context = steps.context
        records = await trainers(self._membership, self._run.run_id)
        await seek_endorsement(context, records)
        proof = await furthest(context, claims_of(context, records))
        if proof is None and context.replica.is_new and context.endorsements.newest is not None:
            proof, records = await self._await_endorsed(context, context.endorsements.newest)
        if proof is not None and proof.rank > context.replica.rank:
            await steps.move_to(proof, records)
        bring = self._options.setup.bring
        if bring is not None and context.replica.proof is None:
            state = await self._first_state(await in_own_thread(bring))
            check_genesis(state.manifest, self._run.config)
            context.replica.begin(state)
        self._note_if_alone(context, records)
        self._reports.probation(context.replica)  # for a member that was restarted and finds nobody further
        self.has_joined = True
        self._announce("training")
        return whom_to_ask(claims_of(context, records), context.replica.roster, context.chance)

    def _note_if_alone(self, context: RunContext, records: Mapping[str, TrainerRecord]) -> None:
        """Say so if nobody is there who could have a later state: a run whose members have all left begins anew."""
        if records.keys() - {self._network.peer_id}:
            return
        whence = "begins the run from its initial state"
        if not context.replica.is_new:
            whence = f"goes on from its own state of outer step {context.replica.outer_step}"
        self.alone = f"no other member was found, so this one {whence}"
        logger.warning("%s: %s", self._run.run_id, self.alone)

    async def _await_endorsed(
        self, context: RunContext, endorsement: Endorsement
    ) -> tuple[Proof, dict[str, TrainerRecord]]:
        """Wait for a member that shows a state after `endorsement`, and return its proof and the records: a newcomer
        must not begin such a run from its start."""
        reason = f"no member shows a state that follows from outer step {endorsement.outer_step}, which the run's "
        reason += "author endorses: waiting for one"
        self._reports.aborted(GiveUp(step=endorsement.outer_step, attempt=0, reason=reason))
        while True:
            await asyncio.sleep(WATCH_S)
            proof, records = await newest_shown(context, self._membership)
            if proof is not None:
                return proof, records

    # --- reports -----------------------------------------------------------------------------------------------------

    def _on_held_out(self, step: int, loss: float) -> None:
        self._on_event(HeldOutMeasured(step=step, loss=loss))
        if self._steps is not None and self._steps.interval_loop is not None:
            self._announce("training")

    def _announce(self, state: TrainerState) -> None:
        """Publish this member's record."""
        latest, endorsement = self._steps.latest if self._steps else None, self._endorsements.newest
        manifest = self.state.manifest if self.state else None
        record = TrainerRecord(
            run=self._run.run_id,
            outer_step=manifest.outer_step if manifest else 0,
            digest=self.digest,
            tokens_per_s=latest.tokens_per_s if latest else 0.0,
            loss=latest.mean_loss if latest else None,
            state=state,
            report=self.report,
            num_parameters=manifest.num_values if manifest else None,
            validation=self._held_out.newest,
            endorsed_step=endorsement.outer_step if endorsement else 0,
            held_out_scores=lowest_scores(manifest.held_out) if manifest else {},
        )
        self._membership.announce(record)
