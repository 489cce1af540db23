"""Makes work that others announce into work of this node: checks what they claim, and says why it cannot be taken.

What nobody asked this node for by name must not cost it much: only models of a hub, checked against the revision that
their servers announce, or made here; only runs whose data is on this machine and whose state fits into its memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from swarm.serving.model.model_files import hub_revision, open_model
from swarm.serving.server.server_options import DTYPES, Dtype
from swarm.training.inner.run_model import check_model
from swarm.training.run.run_config import RunConfig
from swarm_protocol.errors import ConfigError

from swarm_node.formatting import size
from swarm_node.model_source import check_served
from swarm_node.needs import ModelNeed, Need, RunNeed
from swarm_node.node import Node
from swarm_node.run_source import run_of_id
from swarm_node.serving import Serving
from swarm_node.settings import HubId, parse_model
from swarm_node.volunteer import check_run, train

TRAINING_BYTES = 40
"""Of memory for each parameter, in fp32: weights, gradient and two moments; the committed state twice; the round."""

Work = Callable[[], Awaitable[None]]


async def prepared(node: Node, need: Need) -> Work:
    """The work that meets `need`. Raises SwarmError, with the reason, if it is not for this node."""
    return await _training(node, need) if isinstance(need, RunNeed) else await _serving(node, need)


async def _serving(node: Node, need: ModelNeed) -> Work:
    model, dtype = await asyncio.to_thread(_origin, need, node.home.checkpoints / need.name / need.name)
    await asyncio.to_thread(check_served, model, node.home, node.config.blocks)
    return Serving(node, model, need.name, numbered=True, dtype=dtype).until_leaving


def _origin(need: ModelNeed, trained: Path) -> tuple[Path | HubId, Dtype]:
    """Where the weights are to be had that the servers have, and as what they hold them. Blocks."""
    if (trained / "config.json").is_file():
        files = open_model(trained)
        for dtype in DTYPES:
            if files.revision(dtype) == need.revision:
                return trained, dtype
    for source in need.sources:
        model = parse_model(source)
        if isinstance(model, HubId) and model.name == need.name:
            for dtype in DTYPES:
                if hub_revision(model.revision, dtype) == need.revision:
                    return model, dtype
    raise ConfigError(
        "its servers have it from a directory of their own, and name no hub",
        remedy="give --model the directory that holds it",
    )


async def _training(node: Node, need: RunNeed) -> Work:
    run, origin = await run_of_id(node.network, node.membership, node.home, need.name)
    config = run.config
    check_run(config, node.config)
    if config.admission and node.network.peer_id not in config.admission:
        raise ConfigError("it admits only the peers that it names", remedy="ask its author to name this one")
    if need.num_helpers >= config.max_group:
        raise ConfigError(f"its group of {config.max_group} is full", remedy="wait until a member leaves")
    _check_data(config, node)
    num_bytes = TRAINING_BYTES * await asyncio.to_thread(check_model, config)
    if num_bytes > node.hardware.free_memory_bytes:
        raise ConfigError(f"it needs about {size(num_bytes)} of memory", remedy="free some")
    return partial(train, node, run, origin)


def _check_data(config: RunConfig, node: Node) -> None:
    """Raises ConfigError for data that would have to be downloaded, or that the user would have to name."""
    lacking = {
        "--data PATH": config.data.source == "files" and node.config.data is None,
        "--tokenizer PATH": config.data.tokenizer == "local" and node.config.tokenizer is None,
    }
    if missing := [option for option, lacks in lacking.items() if lacks]:
        raise ConfigError("it trains on each member's own data", remedy=f"give {' and '.join(missing)}")
    if config.data.source == "hub" or "/" in config.data.tokenizer:
        raise ConfigError(
            "its data has to be downloaded from a hub, which is done for a run that this node was told to train",
            remedy="give --run its id",
        )
    if config.start.checkpoint and node.config.start is None:
        raise ConfigError(
            "its checkpoint has to be brought, which is done for a run that this node was told to train",
            remedy="give --run its id",
        )
