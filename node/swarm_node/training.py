"""Trains one run on this node: resumes it, tells how it goes, keeps checkpoints, and exports the result.

`swarm.training.trainer` does the training; this is its owner, which has the disk. A checkpoint that cannot be written
is a warning and not the end.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from swarm.training.checkpoint import Checkpoint, load_newest
from swarm.training.events import (
    Admitted,
    IntervalDone,
    IntervalFailed,
    OuterStep,
    RoundAborted,
    StateFetched,
    TrainingEvent,
    Validated,
)
from swarm.training.export import export_hf
from swarm.training.inner import InnerLoop
from swarm.training.interval import Materials, prepare
from swarm.training.run_file import SignedRun
from swarm.training.state import ReplicaState
from swarm.training.trainer import Trainer, TrainerOptions
from swarm_protocol.control_messages import TrainingStatus
from swarm_protocol.errors import ConfigError, PeerError

from swarm_node.home import explained
from swarm_node.node import Node
from swarm_node.saving import Saving, Snapshot

LINGER_S = 30.0  # for members that are a step behind: the last state is to be had from those who have it
LOOK_S = 1.0

_EVENTS = {
    StateFetched: "state_fetched",
    OuterStep: "outer_step",
    RoundAborted: "round_aborted",
    Validated: "validated",
}


class Training:
    """One run on one node. Whoever enters `taking_part` owns it."""

    def __init__(self, node: Node, run: SignedRun) -> None:
        self._node = node
        self._run = run
        self._folder = node.home.checkpoints / run.run_id
        self._inner: InnerLoop | None = None
        self._trainer: Trainer | None = None
        self._saving = Saving(
            self._folder,
            keep=node.config.keep_checkpoints,
            on_saved=lambda step, path: self._emit("checkpoint", outer_step=step, path=str(path)),
            on_failure=self._warn,
        )
        self._begun = False

    @asynccontextmanager
    async def taking_part(self) -> AsyncIterator[None]:
        """Be a member of the run, ready to `finish` it; whoever is late gets the state from here until this ends.

        Raises SwarmError if the run cannot be trained here.
        """
        resumed = await asyncio.to_thread(load_newest, self._folder)
        materials = await asyncio.to_thread(self._prepare, resumed)
        self._show(resumed.state.outer_step if resumed else 0)
        self._trainer = Trainer(
            self._node.network,
            self._node.membership,
            self._node.identity,
            self._run,
            on_event=self._tell,
            options=TrainerOptions(
                materials=materials,
                state=resumed.state if resumed else None,
                certificate=resumed.certificate if resumed else b"",
            ),
        )
        try:
            yield
        finally:
            try:
                await self._saving.finish()
            finally:
                await self._trainer.close()

    async def finish(self) -> Path | None:
        """Train until the run's last outer step is committed: its model's directory; None if told to leave before."""
        assert self._trainer is not None
        stopping = asyncio.create_task(self._stop_when_leaving(self._trainer), name="stop training")
        try:
            await self._trainer.run()
        finally:
            stopping.cancel()
        self._node.activity.training = None
        state = self._trainer.state
        if state is None or state.outer_step < self._run.config.outer_steps:
            return None
        digest = await asyncio.to_thread(lambda: state.manifest().digest())
        self._emit("run_finished", outer_step=state.outer_step, digest=digest.hex())
        return await asyncio.to_thread(self._export, state)

    async def let_others_finish(self) -> None:
        """Stay until all other members have the last state too, but not for ever."""
        until_s = asyncio.get_running_loop().time() + LINGER_S
        while asyncio.get_running_loop().time() < until_s and await self._someone_is_behind():
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._node.departure.leaving.wait()
                return
            except TimeoutError:
                continue

    def _prepare(self, resumed: Checkpoint | None) -> Materials:
        materials = prepare(self._run.config, self._node.hardware.device)
        assert isinstance(materials.inner, InnerLoop)
        self._inner = materials.inner
        if resumed is not None:
            materials.inner.load_state(resumed.inner)
        return materials

    async def _stop_when_leaving(self, trainer: Trainer) -> None:
        await self._node.departure.leaving.wait()
        trainer.stop()

    async def _someone_is_behind(self) -> bool:
        try:
            trainers = await self._node.membership.trainers(self._run.run_id)
        except PeerError:
            return False
        others = [record for peer_id, record in trainers.items() if peer_id != self._node.network.peer_id]
        return any(record.state in {"joining", "training"} for record in others)

    # --- what others hear -------------------------------------------------------------------------------------------

    def _tell(self, event: TrainingEvent) -> None:
        self._tell_begin(event)
        match event:
            case IntervalDone():
                told = {name: value for name, value in asdict(event).items() if name != "num_steps"}
                self._emit("interval", **told)
            case IntervalFailed():
                message = f"this node brings nothing to outer step {event.step}: {event.reason}"
                self._node.emitter.emit("warning", message=message, remedy="")
            case StateFetched() | OuterStep() | RoundAborted() | Validated():
                self._emit(_EVENTS[type(event)], **asdict(event))
            case Admitted():
                pass
        if isinstance(event, OuterStep):
            self._show(event.step, loss=event.loss, tokens_per_s=event.tokens_per_s)
            self._save_soon()

    def _tell_begin(self, event: TrainingEvent) -> None:
        """The first event of a trainer means that it has the state."""
        if self._begun:
            return
        self._begun = True
        has_step = isinstance(event, StateFetched | Validated)
        self._node.activity.state = "training"
        self._emit("training", outer_step=event.step if has_step else event.step - 1)

    def _emit(self, name: str, **fields: object) -> None:
        self._node.emitter.emit(name, run=self._run.run_id, **fields)

    def _show(self, step: int, *, loss: float | None = None, tokens_per_s: float = 0.0) -> None:
        self._node.activity.training = TrainingStatus(
            run=self._run.run_id,
            outer_step=step,
            num_outer_steps=self._run.config.outer_steps,
            loss=loss,
            tokens_per_s=tokens_per_s,
        )

    # --- what is kept -----------------------------------------------------------------------------------------------

    def _save_soon(self) -> None:
        """Save the state that was just committed. The moments are copied before the next interval changes them."""
        assert self._trainer is not None
        assert self._inner is not None
        state = self._trainer.state
        assert state is not None
        inner = self._trainer.between_intervals(self._inner.state)
        self._saving.soon(Snapshot(state=state, certificate=self._trainer.certificate, inner=inner))

    def _warn(self, error: ConfigError) -> None:
        self._node.emitter.emit("warning", message=error.message, remedy=error.remedy)

    def _export(self, state: ReplicaState) -> Path:
        """Write the model anew; a former one of the same run goes first."""
        place = self._folder / self._run.run_id  # whoever serves it later serves it under this name
        with explained("write the model"):
            if place.exists():
                shutil.rmtree(place)
            export_hf(state.theta_N, self._run.config, place)
        self._emit("exported", path=str(place))
        return place
