"""Trains one run on this node: resumes it, reports its progress, keeps checkpoints, and exports the result.

`swarm.training.member.run_member` does the training; this module owns it and writes to disk. A checkpoint that cannot
be written causes a warning and does not end the training.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from swarm.ended_tasks import end_tasks
from swarm.network.link_diagnosis import LinkWatch
from swarm.start_checkpoint import bringing
from swarm.threads import in_own_thread
from swarm.training import trainer_events as events
from swarm.training.data.local_data import LocalData, Progress, shared_cache
from swarm.training.evidence.bans import how_long
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.inner.interval import TrainingSetup, prepare
from swarm.training.inner.one_device import LocalOptions
from swarm.training.member.checkpoint_writer import CheckpointWriter
from swarm.training.member.members_watch import let_others_finish
from swarm.training.member.run_member import RunMember, RunMemberOptions
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.checkpoint import Checkpoint, steps_in
from swarm.training.state.export import export_hf
from swarm.training.state.replica_state import ReplicaState
from swarm.training.state.state_download import ChunkFolder
from swarm_protocol.control_messages import MAX_CONVICTED_LINES, TrainingStatus
from swarm_protocol.errors import ConfigError, SwarmError
from swarm_protocol.identity import short_id
from torch import Tensor

from swarm_node.events.tensorboard_files import recorded
from swarm_node.formatting import rate
from swarm_node.metrics.readings import TrainerMetrics, read_trainer
from swarm_node.node import Node
from swarm_node.roles.sources import checkpoint_source
from swarm_node.roles.training_words import awaited, ban_words, beside, standing_in, trouble, when_late
from swarm_node.settings.config import Config
from swarm_node.storage.home import EVIDENCE, explained

LINKS_S = 10.0
"""Interval in seconds between checks of the members' reports for slow links."""

QUICK_S = 1.0
"""Seconds of waiting for the current step before this is reported."""

_EVENTS = {
    events.OuterStep: "outer_step",
    events.StateFetched: "state_fetched",
    events.RoundAborted: "round_aborted",
    events.IntervalValidated: "interval_validated",
    events.FalselyAccused: "falsely_accused",
    events.RunResumed: "run_resumed",
    events.OnProbation: "on_probation",
    events.RunEntered: "entered",
    events.StateEndorsed: "state_endorsed",
    events.HeldOutScored: "held_out_scored",
    events.HeldOutMeasured: "validated",
}

logger = logging.getLogger(__name__)


class RunTraining:
    """Trains one run on one node. The caller that enters `taking_part` owns it."""

    def __init__(self, node: Node, run: SignedRun) -> None:
        self._node = node
        self._run = run
        self._folder = node.home.checkpoints / run.run_id
        self._inner: InnerLoop | None = None
        self._trainer: RunMember | None = None
        self._saving = CheckpointWriter(
            self._folder,
            keep=node.config.keep_checkpoints,
            keep_every=node.config.keep_every,
            on_saved=lambda step, path: self._emit("checkpoint", outer_step=step, path=str(path)),
            on_failure=self._warn,
        )
        self._metrics = TrainerMetrics(node.metrics, run.config.outer_steps)
        self._links = LinkWatch()
        self._begun = False
        self._reports_tokens = False
        self._standing: dict[str, Any] = {}
        """The fields of a status on probation, entry, endorsements, scores and another history."""

    @asynccontextmanager
    async def taking_part(self) -> AsyncIterator[None]:
        """Be a member of the run, ready to `finish` it. Until the context ends, late members can fetch the state from
        this node.

        Raises SwarmError if the run cannot be trained here, and PreparationStopped if the node leaves before its data
        is ready.
        """
        config = self._node.config
        with recorded(self._node.emitter, config.tensorboard, self._run.run_id, config.name):
            trainer = self._trainer = await self._make_trainer()
            try:
                self._node.activity.waits = self._with_waiting
                me = self._node.network.peer_id
                with self._node.metrics.reading(lambda: read_trainer(trainer, self._links.named, me)):
                    yield
            finally:
                self._node.activity.training = None
                try:
                    await self._saving.finish()
                finally:
                    await trainer.close()

    async def _make_trainer(self) -> RunMember:
        """Return the member, made from the newest checkpoint or from the run's start. The member then owns the
        checkpoint's tensors."""
        resumed = await asyncio.to_thread(self._saving.resume)
        setup = await in_own_thread(self._prepare, resumed, drop=lambda setup: setup.inner.close())
        self._show(resumed.state.outer_step if resumed else 0)
        start = self._run.config.start.checkpoint and f", the checkpoint {self._run.config.start.checkpoint}"
        step = resumed and resumed.state.outer_step
        found = f"from the run's start{start}" if step is None else f"from the checkpoint of outer step {step}"
        self._node.steps.done("warm-up", f"data and model are ready; {found}, unless others are further")
        node, run, folder = self._node, self._run, self._folder
        options = RunMemberOptions(
            setup=setup,
            state=resumed.state if resumed else None,
            certificate=resumed.certificate if resumed else b"",
            history=resumed.history if resumed else (),
            invitations=node.config.invitation,
            chunks=ChunkFolder(node.home.cache / "chunks" / run.run_id, max_bytes=8 * setup.theta_N.numel()),
            max_bytes_per_s=min(node.limits.up_bytes_per_s, node.limits.down_bytes_per_s),
        ).kept_in(folder / "votes", folder / EVIDENCE, run, node.network.network_id)
        return RunMember(node.network, node.membership, node.identity, run, on_event=self._tell, options=options)

    async def finish(self) -> Path | None:
        """Train to the run's last outer step. Return the model's directory, or None if the node leaves earlier."""
        assert self._trainer is not None
        beside = [
            asyncio.create_task(self._stop_when_leaving(self._trainer), name="stop training"),
            asyncio.create_task(self._watch_links(), name="watch links"),
        ]
        try:
            await self._trainer.run()
        finally:
            await end_tasks(*beside)
        self._node.activity.training = None
        state = self._trainer.state
        if state is None or state.outer_step < self._run.config.outer_steps:
            return None
        state = await asyncio.to_thread(state.hashed_again)  # report and export what is in memory now
        self._emit("run_finished", outer_step=state.outer_step, digest=state.digest.hex())
        try:
            return await asyncio.to_thread(self._export, state)
        except ConfigError as error:
            await self._saving.finish()
            raise ConfigError(error.message, remedy=self._other_export(error.remedy, state.outer_step)) from error

    async def let_others_finish(self) -> None:
        """Stay for a limited time, until all other members have the last state, and those that watch were shown it."""
        node = self._node
        await let_others_finish(
            node.membership,
            self._run.run_id,
            node.network.peer_id,
            node.work_end.leaving,
            on_wait=lambda peers, seconds: self._emit("lingering", peers=peers, seconds=seconds),
            is_watched=lambda: self._trainer is not None and self._trainer.is_watched,
        )

    def _prepare(self, resumed: Checkpoint | None) -> TrainingSetup:
        node, run, config = self._node, self._run.config, self._node.config
        stop = node.work_end.leaving.is_set
        data = LocalData(path=config.data, tokenizer=config.tokenizer, on_progress=self._tokenizing, stop=stop)
        bring = bringing(run, checkpoint_source(run, config, node.emitter), stop)
        local, moments = local_options(config, node.hardware.device), resumed.inner if resumed else None
        setup = prepare(run, local, data, bring, moments)
        assert isinstance(setup.inner, InnerLoop)
        self._inner = setup.inner
        return setup

    async def _stop_when_leaving(self, trainer: RunMember) -> None:
        await self._node.work_end.leaving.wait()
        trainer.stop()
        await asyncio.sleep(QUICK_S)
        self._node.emitter.say("  waiting for the current step; press Ctrl-C again to end it now")

    async def _watch_links(self) -> None:
        """Report each slow link that the members' reports show, once. Runs until cancelled."""
        told: set[tuple[str, ...]] = set()
        while True:
            await asyncio.sleep(LINKS_S)
            try:
                records = await self._node.membership.trainers(self._run.run_id)
            except SwarmError as error:
                logger.info("cannot see the other members' reports: %s", error)
                continue
            self._links.update({peer: record.report for peer, record in records.items() if record.report is not None})
            slow = {(each.kind, *each.peers): each for each in self._links.named}
            for key in slow.keys() - told:
                self._emit("slow_link", words=slow[key].words(short_id), **asdict(slow[key]))
            told = set(slow)

    def _tell(self, event: events.TrainingEvent) -> None:
        assert self._trainer is not None
        self._report_start(event)
        self._measure(event)
        self._standing |= standing_in(event, self._run.config.probation.steps)
        match event:
            case events.IntervalDone():
                self._say(event.step, event.tokens_per_s)
                fields = asdict(event)
                del fields["num_steps"]
                self._emit("interval", **fields)
            case events.ContributionLate():
                self._emit("contribution_late", when=when_late(event.late_s), **asdict(event))
            case events.IntervalFailed() | events.InvitationRefused() | events.OtherHistory():
                self._node.emitter.warning(*trouble(event, self._run.run_id))
            case events.Admitted():
                pass  # only for the checkpoint below
            case events.MemberConvicted():
                self._emit("member_convicted", how_long=how_long(event.until), **asdict(event))
            case _:
                self._emit(_EVENTS[type(event)], **beside(event, self._run.config.fragments), **asdict(event))
        if isinstance(event, events.OuterStep):
            self._show(event.step, loss=event.loss, tokens_per_s=event.tokens_per_s)
            self._say(event.step, event.tokens_per_s)
        elif isinstance(event, events.StateEndorsed) and event.is_other:
            message = (
                f"the run's author endorsed another state at outer step {event.step} than this node has: "
                "this node does not follow the author's run"
            )
            remedy = "stop this node, and join again with a new --home"
            self._node.emitter.warning(message, remedy=remedy)
        self._saving.after(event, self._trainer, self._moments)

    def _moments(self) -> Mapping[str, Sequence[Tensor]]:
        assert self._inner is not None
        return self._inner.state()

    def _measure(self, event: events.TrainingEvent) -> None:
        assert self._trainer is not None
        self._metrics.count(event)
        report = self._trainer.report
        if isinstance(event, events.RoundAborted):
            self._node.traces.round_aborted(event, time.time())
        elif isinstance(event, events.OuterStep) and report is not None:
            self._metrics.report(report)
            self._node.traces.outer_step(self._run.run_id, event, report.phases_s, time.time())

    def _report_start(self, event: events.TrainingEvent) -> None:
        """Report the start at the first event that shows that the member has the state.

        An endorsement or another history does not show this, and neither does an aborted round before the member has
        joined.
        """
        assert self._trainer is not None
        is_waiting = isinstance(event, events.RoundAborted) and not self._trainer.has_joined
        if self._begun or is_waiting or isinstance(event, events.StateEndorsed | events.OtherHistory):
            return
        self._begun = True
        has_step = isinstance(
            event,
            events.StateFetched | events.HeldOutMeasured | events.RunResumed | events.OnProbation | events.RunEntered,
        )
        self._node.activity.state = "training"
        step = event.step if has_step else event.step - 1
        alone = self._trainer.alone
        detail = f"from outer step {step} of {self._run.config.outer_steps}"
        self._node.steps.done("training", f"{detail}; {alone}" if alone else detail)
        self._emit("training", outer_step=step, is_alone=bool(alone))

    def _tokenizing(self, progress: Progress) -> None:
        if not self._reports_tokens:
            self._reports_tokens = True
            self._node.emitter.say(f"  tokens are cached in {shared_cache()}, for all homes of this user")
        if progress.waiting:
            self._node.emitter.say("  another process on this machine tokenizes the same data: waiting for its tokens")
            return
        fields = asdict(progress)
        del fields["waiting"]
        self._emit("tokenizing", folder=str(shared_cache()), **fields)

    def _emit(self, name: str, **fields: object) -> None:
        self._node.emitter.emit(name, run=self._run.run_id, **fields)

    def _say(self, step: int, tokens_per_s: float) -> None:
        speed = f", {rate(tokens_per_s)} here" if tokens_per_s else ""  # the node may not have trained yet
        self._node.emitter.status("training", f"TRAINING step {step} of {self._run.config.outer_steps}{speed}")

    def _with_waiting(self, training: TrainingStatus) -> TrainingStatus:
        bans = self._trainer.bans[-MAX_CONVICTED_LINES:] if self._trainer else ()
        slow = tuple(each.words(short_id) for each in self._links.named)
        training = replace(training, slow_links=slow, convicted=tuple(map(ban_words, bans)), **self._standing)
        waiting = self._trainer.waiting if self._trainer else None
        if waiting is None:
            return training
        return replace(training, waits_for=awaited(waiting), waits_s=waiting.seconds)

    def _show(self, step: int, *, loss: float | None = None, tokens_per_s: float = 0.0) -> None:
        self._node.activity.training = TrainingStatus(
            run=self._run.run_id,
            outer_step=step,
            num_outer_steps=self._run.config.outer_steps,
            loss=loss,
            tokens_per_s=tokens_per_s,
        )

    def _warn(self, error: ConfigError) -> None:
        self._node.emitter.warning(error.message, remedy=error.remedy)

    def _export(self, state: ReplicaState) -> Path:
        """Write the model. It replaces an earlier export of the same run only once it is complete."""
        place = self._folder / self._run.run_id  # the model is served under this name
        written = place.with_name(f"{place.name}.new")
        with explained("write the model"):
            if written.exists():
                shutil.rmtree(written)  # left by a killed process
            export_hf(state.theta_N, self._run.config, written, tokenizer=self._node.config.tokenizer)
            if place.exists():
                shutil.rmtree(place)
            written.rename(place)
        self._emit("exported", path=str(place), outer_step=state.outer_step, digest=state.digest.hex())
        return place

    def _other_export(self, remedy: str, step: int) -> str:
        """Return what to do where the model of the last state could not be written."""
        run_id, home = self._run.run_id, self._node.home.path
        if step in steps_in(self._folder):
            return f"{remedy}; then export this node's checkpoint: swarm-node run export {run_id} --home {home}"
        return (
            f"{remedy}; this node keeps no checkpoint of outer step {step}: export it from the other members while "
            f"they are there: swarm-node run export {run_id} --peers ADDR"
        )


def local_options(config: Config, device: str) -> LocalOptions:
    """Return how this node computes its inner steps: on `device`, unless devices are configured. Raises ConfigError."""
    return LocalOptions(
        devices=config.devices or (device,),
        micro_batch_windows=config.micro_batch,
        autocast=config.autocast,
        activation_checkpointing=config.checkpoint_activations,
        compile=config.compile,
    )
