"""A volunteer with a task: it trains a run, or serves a model that it was given or has trained.

`prepare_work` turns a need that others announce into such a task. Such work must not cost the node much, since its user
did not name it. So it takes only models from a hub, checked against the revision that their servers announce, or models
trained here, and only runs whose data is on this machine and whose state fits into its memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numba.np.arraymath  # noqa: F401 (with the first compiled loop it would be too late to do without SciPy)
from swarm.serving.manifest.manifest_book import fetch_manifest
from swarm.serving.model.model_files import hub_revision, load_manifest, open_model
from swarm.serving.model.weight_check import check_weights
from swarm.serving.server.deployment import DTYPES, Dtype
from swarm.start_checkpoint import check_source, no_copy
from swarm.training.data.corpus import check_meaning
from swarm.training.data.local_data import LocalData
from swarm.training.data.tokenizer import own_tokenizer
from swarm.training.data.tokenizing import PreparationStopped
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_cost import PARAMETER_BYTES, activation_bytes
from swarm.training.run.run_file import load_checked_run
from swarm.training.run.run_model import check_model, refuse_module_run
from swarm.training.run.settings import is_commit
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.checkpoint import steps_in
from swarm_protocol.errors import ConfigError
from swarm_protocol.manifest_messages import PublishedManifest

from swarm_node.formatting import plural, size
from swarm_node.node import Node, NodeRole, RelayUse
from swarm_node.roles.helper import ModelNeed, Need, RunNeed
from swarm_node.roles.run_entry import check_may_enter
from swarm_node.roles.serving import ModelServing, model_name
from swarm_node.roles.sources import check_served, run_of_id
from swarm_node.roles.training import RunTraining, local_options
from swarm_node.settings.config import Config
from swarm_node.settings.parsers import HubId, RunId, parse_model
from swarm_node.storage.home import Home
from swarm_node.storage.kept_runs import keep_copy

NUM_LOOKS, LOOK_S = 5, 1.0
"""Searches for members of a run, and seconds between them. Their records may just be arriving."""


class VolunteerRole(NodeRole):
    """The role of a node that was given a run or a model. Raises ConfigError or IntegrityError if it cannot train or
    serve it."""

    name = "volunteer"
    num_steps = 4  # "takes", what the work needs, "warm-up", and "training" or "serving"
    computes = True

    def __init__(self, config: Config) -> None:
        self._run: SignedRun | None = None
        if config.run:
            local_options(config, "cpu")
        if isinstance(config.run, Path):
            self._run = load_checked_run(config.run)
            check_run(self._run.config, config)
        self._model_name = ""
        self._published: PublishedManifest | None = None
        if config.model:
            self._published = load_manifest(config.manifest) if config.manifest else None
            self._model_name = model_name(config.model)
            check_served(config.model, Home(config.home), config.blocks)
            if isinstance(config.model, Path):
                files = open_model(config.model, self._published)
                files.small_files()  # which clients must be able to use
                check_weights(files)

    def relay(self, config: Config) -> RelayUse:
        return config.relay

    async def run(self, node: Node) -> None:
        if node.config.model is not None:
            serving = ModelServing(node, node.config.model, self._model_name, numbered=True, published=self._published)
            await serving.until_leaving()
            return
        why = f"as told by {node.config.origin('run')}"
        run = self._run
        if isinstance(node.config.run, RunId):
            run, origin = await run_of_id(node.network, node.membership, node.home, node.config.run.run_id)
            check_may_enter(run, node.config, node.network.peer_id)
            check_run(run.config, node.config)
            why = f"{why}, {origin}"
        assert run is not None
        await train(node, run, why)


async def train(node: Node, run: SignedRun, why: str) -> None:
    """Train `run` to its end, then serve the result if the settings say so. Raises SwarmError."""
    await _check_start(node, run)
    keep_copy(node.home, run)
    node.steps.done("takes", f"run {run.run_id}, signed by {run.peer_id}: {why}")
    node.steps.done("schedule", schedule_of(run.config))
    training = RunTraining(node, run)
    with suppress(PreparationStopped):
        async with training.taking_part():
            directory = await training.finish()
            if directory is None or node.work_end.leaving.is_set():
                return
            if node.config.then_serve:
                await ModelServing(node, directory, run.run_id, numbered=False).until_leaving()
            else:
                await training.let_others_finish()


async def _check_start(node: Node, run: SignedRun) -> None:
    """Refuse a run that nobody has begun and whose start checkpoint is not here, before data and model are prepared.

    A member that joins others gets the state from them. Raises ConfigError.
    """
    start = run.config.start
    is_own = bool(start.checkpoint) and not start.is_on_hub
    if not is_own or node.config.start is not None or steps_in(node.home.checkpoints / run.run_id):
        return
    for _ in range(NUM_LOOKS):
        if (await node.membership.trainers(run.run_id)).keys() - {node.network.peer_id}:
            return
        await asyncio.sleep(LOOK_S)
    raise no_copy()


def check_run(run: RunConfig, config: Config) -> None:
    """Refuse a run that a node with `config` cannot train. Raises ConfigError."""
    refuse_module_run(run.model)
    check_meaning(run.data, LocalData(path=config.data, tokenizer=config.tokenizer))
    if run.data.tokenizer == "local":
        own_tokenizer(config.tokenizer)  # needed to export the finished model, even if tokens are prepared
    check_source(run.start, config.start)


def schedule_of(run: RunConfig) -> str:
    """Describe the steps of a run in one line."""
    steps = f"{plural(run.outer_steps, 'outer step')} of {plural(run.interval_steps, 'inner step')}"
    streaming = f", each of which moves one of {run.fragments} fragments" if run.fragments > 1 else ""
    overlap = f", beside the next {plural(run.overlap_steps, 'inner step')}" if run.overlap_steps else ""
    return f"{steps}{streaming}{overlap}"


Work = Callable[[], Awaitable[None]]


async def prepare_work(node: Node, need: Need) -> Work:
    """Return the work that meets `need`. Raises SwarmError, with the reason, if this node cannot do it."""
    return await _training(node, need) if isinstance(need, RunNeed) else await _serving(node, need)


async def _serving(node: Node, need: ModelNeed) -> Work:
    published = None
    if need.manifest:
        published = await fetch_manifest(node.network, need.name, need.manifest, need.holders)
    trained = node.home.checkpoints / need.name / need.name
    model, dtype = await asyncio.to_thread(_origin, need, trained, published)
    await asyncio.to_thread(check_served, model, node.home, node.config.blocks)
    return ModelServing(node, model, need.name, numbered=True, dtype=dtype, published=published).until_leaving


def _sources(
    need: ModelNeed, trained: Path, published: PublishedManifest | None
) -> Iterator[tuple[Path | HubId, Callable[[Dtype], str]]]:
    """Yield the sources that may have the weights, each with the function that returns its revision in a dtype."""
    hub_models = [model for model in map(parse_model, need.sources) if isinstance(model, HubId)]
    if published is not None and hub_models:
        # the files of a published model are checked when they are read, so its name on the hub may differ
        yield hub_models[0], published.revision
    if (trained / "config.json").is_file():
        yield trained, open_model(trained).revision
    for model in hub_models:
        # servers make the name and the digest up alike, and a branch may have other weights tomorrow
        if model.name == need.name and is_commit(model.revision):
            yield model, partial(hub_revision, model.revision)


def _origin(need: ModelNeed, trained: Path, published: PublishedManifest | None) -> tuple[Path | HubId, Dtype]:
    """Return a source of the weights that the servers have, and their dtype. Blocks. Raises ConfigError."""
    for source, revision_of in _sources(need, trained, published):
        for dtype in DTYPES:
            if revision_of(dtype) == need.revision:
                return source, dtype
    raise ConfigError(
        "its servers have it from their own directories, and name no hub",
        remedy="name a directory with the model: --model DIR",
    )


async def _training(node: Node, need: RunNeed) -> Work:
    run, origin = await run_of_id(node.network, node.membership, node.home, need.name)
    config = run.config
    check_may_enter(run, node.config, node.network.peer_id)
    check_run(config, node.config)
    if need.num_helpers >= config.max_trainers:
        raise ConfigError(f"it is full with {config.max_trainers} trainers", remedy="wait until a member leaves")
    _check_data(config, node)
    num_bytes = await asyncio.to_thread(_memory_bytes, config, node.config)
    free_bytes, _ = node.hardware.read_memory()
    if num_bytes > free_bytes:
        remedy = "free some memory, or compute fewer windows at a time with --micro-batch"
        raise ConfigError(f"it needs about {size(num_bytes)} of memory", remedy=remedy)
    return partial(train, node, run, origin)


def _memory_bytes(run: RunConfig, config: Config) -> int:
    """Return roughly how many bytes of one device's memory training `run` takes with `config`. Raises ConfigError."""
    num_parameters = check_model(run)
    num_memories = max(1, sum(device != "cpu" for device in config.devices))
    of_one_device = -(-run.inner.batch_windows // num_memories)
    at_once = min(of_one_device, config.micro_batch or of_one_device)
    activations = activation_bytes(run, at_once, checkpointing=config.checkpoint_activations)
    return PARAMETER_BYTES * num_parameters + activations


def _check_data(config: RunConfig, node: Node) -> None:
    """Refuse data that must be downloaded or named by the user. Raises ConfigError."""
    if config.data.source == "files" and node.config.data is None:
        raise ConfigError("it trains on each member's own data", remedy="give --data PATH")
    if config.data.source == "hub" or "/" in config.data.tokenizer:
        raise ConfigError(
            "its data must be downloaded from a hub, which a node does only for a run that it was told to train",
            remedy="name the run with --run",
        )
    if config.start.checkpoint and node.config.start is None:
        raise ConfigError(
            "its start checkpoint must be loaded, which a node does only for a run that it was told to train",
            remedy="name the run with --run",
        )
