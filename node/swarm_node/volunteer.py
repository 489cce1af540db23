"""A volunteer: trains the run it was given, and serves the model it was given or has trained."""

from __future__ import annotations

from contextlib import suppress

from swarm.training.data import LocalData, PreparationStopped
from swarm.training.data.loading import check_meaning
from swarm.training.module_run import refuse_module_run
from swarm.training.run_config import RunConfig
from swarm.training.run_file import load_run
from swarm.training.signed_run import SignedRun

from swarm_node.config import Config
from swarm_node.node import Node, RelayUse, RoleName
from swarm_node.serving import Serving, model_name
from swarm_node.standby import relay_use
from swarm_node.training import Training, local_options


class Volunteer:
    """A role for a config with a run or a model. Raises ConfigError or IntegrityError for one that cannot be."""

    name: RoleName = "volunteer"
    num_steps = 4  # takes, what is needed for it, warm-up, and that it goes
    computes = True

    def __init__(self, config: Config) -> None:
        self._run: SignedRun | None = load_run(config.run) if config.run else None
        if self._run is not None:
            refuse_module_run(self._run.config.model)
            local_options(config, "cpu")
            check_meaning(self._run.config.data, LocalData(path=config.data, tokenizer=config.tokenizer))
        self._model_name = model_name(config.model) if config.model else ""

    def relay(self, config: Config) -> RelayUse:
        return relay_use(config)

    async def run(self, node: Node) -> None:
        if self._run is not None:
            with suppress(PreparationStopped):
                await self._train_then_serve(node, self._run)
        else:
            assert node.config.model is not None
            await Serving(node, node.config.model, self._model_name, numbered=True).until_leaving()

    async def _train_then_serve(self, node: Node, run: SignedRun) -> None:
        node.steps.done("takes", f"run {run.run_id}, signed by {run.peer_id}: as told by {node.config.origin('run')}")
        node.steps.done("course", course(run.config))
        training = Training(node, run)
        async with training.taking_part():
            directory = await training.finish()
            if directory is None or node.departure.leaving.is_set():
                return
            if node.config.then_serve:
                await Serving(node, directory, run.run_id, numbered=False).until_leaving()
            else:
                await training.let_others_finish()


def course(run: RunConfig) -> str:
    """How a run goes, in a line."""
    steps = f"{run.outer_steps} outer steps of {run.interval_steps} inner steps"
    streaming = f", each of which moves one of {run.fragments} fragments" if run.fragments > 1 else ""
    overlap = f", beside the next {run.overlap_steps} inner steps" if run.overlap_steps else ""
    return f"{steps}{streaming}{overlap}"
