"""A volunteer: trains the run it was given, serves the model it was given or has trained, or stands by."""

from __future__ import annotations

from swarm.training.run_file import SignedRun, load_run

from swarm_node.config import Config
from swarm_node.node import Node, RelayUse
from swarm_node.serving import Serving, model_name
from swarm_node.training import Training


class Volunteer:
    """A role. Raises ConfigError or IntegrityError for a run or model that cannot be."""

    num_steps = 2
    computes = True

    def __init__(self, config: Config) -> None:
        self._run: SignedRun | None = load_run(config.run) if config.run else None
        self._model_name = model_name(config.model) if config.model else ""

    def relay(self, config: Config) -> RelayUse:
        """Unless told, a relay is used where a peer beyond this machine could be one and nobody else's way is open."""
        if config.relay != "auto":
            return "use" if config.relay == "use" else "none"
        is_local = all("/ip4/127." in peer or "/ip6/::1/" in peer for peer in config.peers)
        return "none" if is_local or config.announce else "use"

    async def run(self, node: Node) -> None:
        if self._run is not None:
            await self._train_then_serve(node, self._run)
        elif node.config.model is not None:
            await Serving(node, node.config.model, self._model_name, numbered=True).until_leaving()
        else:
            await _stand_by(node)

    async def _train_then_serve(self, node: Node, run: SignedRun) -> None:
        node.steps.done("takes", f"run {run.run_id}, signed by {run.peer_id}: as told by {node.config.origin('run')}")
        node.steps.done("training", f"{run.config.outer_steps} outer steps of {run.config.interval_steps} inner steps")
        training = Training(node, run)
        async with training.taking_part():
            directory = await training.finish()
            if directory is None or node.departure.leaving.is_set():
                return
            if node.config.then_serve:
                await Serving(node, directory, run.run_id, numbered=False).until_leaving()
            else:
                await training.let_others_finish()


async def _stand_by(node: Node) -> None:
    node.activity.state = "idle"
    node.steps.done("takes", "no work: it was given neither --run nor --model")
    node.steps.done("standing by", "join again with --run FILE to train or --model DIR to serve")
    await node.departure.leaving.wait()
