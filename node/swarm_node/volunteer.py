"""A volunteer: trains the run it was given, and serves the model it was given or has trained."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from swarm.trainer.start_checkpoint import check_source
from swarm.training.data import LocalData, PreparationStopped
from swarm.training.data.corpus_loading import check_meaning
from swarm.training.run.module_run import refuse_module_run
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import load_run
from swarm.training.run.signed_run import SignedRun

from swarm_node.config import Config
from swarm_node.home import Home
from swarm_node.model_source import check_served
from swarm_node.node import Node, RelayUse, RoleName
from swarm_node.run_source import keep_copy, run_of_id
from swarm_node.serving import Serving, model_name
from swarm_node.settings import RunId
from swarm_node.standby import relay_use
from swarm_node.training import Training, local_options


class Volunteer:
    """A role for a config with a run or a model. Raises ConfigError or IntegrityError for one that cannot be."""

    name: RoleName = "volunteer"
    num_steps = 4  # takes, what is needed for it, warm-up, and that it goes
    computes = True

    def __init__(self, config: Config) -> None:
        self._run: SignedRun | None = None
        if config.run:
            local_options(config, "cpu")
        if isinstance(config.run, Path):
            self._run = load_run(config.run)
            check_run(self._run.config, config)
        self._model_name = ""
        if config.model:
            self._model_name = model_name(config.model)
            check_served(config.model, Home(config.home), config.blocks)

    def relay(self, config: Config) -> RelayUse:
        return relay_use(config)

    async def run(self, node: Node) -> None:
        if node.config.model is not None:
            await Serving(node, node.config.model, self._model_name, numbered=True).until_leaving()
            return
        why = f"as told by {node.config.origin('run')}"
        run = self._run
        if isinstance(node.config.run, RunId):
            run, origin = await run_of_id(node.network, node.membership, node.home, node.config.run.run_id)
            check_run(run.config, node.config)
            why = f"{why}, {origin}"
        assert run is not None
        await train(node, run, why)


async def train(node: Node, run: SignedRun, why: str) -> None:
    """Train `run` to its end, and then serve its result if the node was told to. Raises SwarmError."""
    keep_copy(node.home, run)
    node.steps.done("takes", f"run {run.run_id}, signed by {run.peer_id}: {why}")
    node.steps.done("course", course(run.config))
    training = Training(node, run)
    with suppress(PreparationStopped):
        async with training.taking_part():
            directory = await training.finish()
            if directory is None or node.departure.leaving.is_set():
                return
            if node.config.then_serve:
                await Serving(node, directory, run.run_id, numbered=False).until_leaving()
            else:
                await training.let_others_finish()


def check_run(run: RunConfig, config: Config) -> None:
    """Raises ConfigError for a run that a node told `config` cannot train."""
    refuse_module_run(run.model)
    check_meaning(run.data, LocalData(path=config.data, tokenizer=config.tokenizer))
    check_source(run.start, config.start)


def course(run: RunConfig) -> str:
    """How a run goes, in a line."""
    steps = f"{run.outer_steps} outer steps of {run.interval_steps} inner steps"
    streaming = f", each of which moves one of {run.fragments} fragments" if run.fragments > 1 else ""
    overlap = f", beside the next {run.overlap_steps} inner steps" if run.overlap_steps else ""
    return f"{steps}{streaming}{overlap}"
