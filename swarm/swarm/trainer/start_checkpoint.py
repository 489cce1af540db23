"""Brings the checkpoint that a run starts from, by the code that brings and reads served models.

It comes from a member's own directory, or from the hub into a cache. Blocks; no state.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from swarm_protocol.errors import ConfigError
from torch import Tensor, nn

from swarm.serving.model.hub_download import OnProgress, download_blocks, find_model
from swarm.serving.model.model_files import ModelFiles, open_model
from swarm.serving.model.safetensors_reader import read_header
from swarm.serving.model.weights import empty_model, needed_shards, read_model
from swarm.training.inner.run_model import check_model
from swarm.training.run.module_run import weights_digest
from swarm.training.run.run_config import RunConfig
from swarm.training.run.start_config import StartConfig
from swarm.training.state.start_weights import differing_settings, fitting_layout, start_theta

_KINDS = frozenset({"F32", "F16", "BF16"})
"""All of which fp32 holds to the last bit."""
MAX_VALUE_BYTES = 8
SPARE_BYTES = 64 << 20
"""A checkpoint has up to 4 bytes a parameter; what else its files may hold, such as heads that training does not use,
is bounded by as much again. A run's author is a stranger, and names what members download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """Where checkpoints come from: `place`, a directory of the member's own, or the hub, by way of the folder `cache`.
    `on_progress` hears of downloads."""

    place: Path | None
    cache: Path
    on_progress: OnProgress = lambda _num_bytes, _total_bytes: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What pins a checkpoint. `differing` are the settings by which its config computes something else than the run's
    model."""

    revision: str
    digest: str
    differing: tuple[str, ...]


def check_source(start: StartConfig, place: Path | None) -> None:
    """Raises ConfigError for a directory that a member names, and the run does not use."""
    if place is not None and not start.checkpoint:
        raise ConfigError(f"the run starts from no checkpoint, so {place} means nothing", remedy="leave out --start")


def bringing(run: RunConfig, source: CheckpointSource) -> Callable[[], Tensor]:
    """What returns the weights that the run starts from, fp32 CPU [N], when it is called.

    Raises ConfigError for a place that means nothing. What it returns raises ConfigError if the checkpoint cannot be
    had or does not fit, IntegrityError if it is damaged or not the pinned one.
    """
    check_source(run.start, source.place)

    def bring() -> Tensor:
        return start_theta(run, _read(_directory(run, source)))

    return bring


def pin_of(run: RunConfig, source: CheckpointSource) -> Pin:
    """What pins the run's checkpoint as it is now. Raises as what `bringing` returns."""
    check_model(run)
    directory = _directory(run, source)
    module = _read(directory)
    fitting_layout(run, module)
    _, _, commit = open_model(directory).source.rpartition("@")
    if run.start.is_on_hub and not commit:
        raise ConfigError(
            f"{directory} does not say which commit of {run.start.checkpoint} it is",
            remedy='leave out --start, or set checkpoint = "local"',
        )
    differing = tuple(differing_settings(run, module.config))
    return Pin(revision=commit if run.start.is_on_hub else "", digest=weights_digest(module), differing=differing)


def _directory(run: RunConfig, source: CheckpointSource) -> Path:
    """Where the checkpoint's files are, brought if need be: not before its config fits the run's model."""
    start = run.start
    if source.place is not None:
        return source.place
    if not start.is_on_hub:
        raise ConfigError(
            "the run starts from a checkpoint of which each member has its own copy",
            remedy="name its directory: --start DIR",
        )
    endpoint = os.environ.get("HF_ENDPOINT")
    found = find_model(start.checkpoint, source.cache, revision=start.revision or "main", endpoint=endpoint)
    files = open_model(found.directory)
    layout = fitting_layout(run, empty_model(files, 0, files.num_blocks))
    num_bytes = sum(found.sizes.get(shard.name, 0) for shard in needed_shards(files, 0, files.num_blocks))
    if num_bytes > MAX_VALUE_BYTES * layout.num_values + SPARE_BYTES:
        raise ConfigError(
            f"{start.checkpoint} has {num_bytes} bytes of weights, far more than the run's {layout.num_values} "
            "parameters",
            remedy="start from a checkpoint that holds this model alone",
        )
    download_blocks(found, 0, files.num_blocks, source.on_progress)
    return found.directory


def _read(directory: Path) -> nn.Module:
    files = open_model(directory)
    _check_kinds(files)
    module: nn.Module = read_model(files, 0, files.num_blocks, torch.float32)
    return module


def _check_kinds(files: ModelFiles) -> None:
    """Raises ConfigError for weights that are quantized, or that fp32 does not hold."""
    names = {name for name, _ in empty_model(files, 0, files.num_blocks).named_parameters()}
    for shard in sorted(set(files.shards.values())):
        for name, entry in read_header(shard).items():
            if name in names and entry.kind not in _KINDS:
                raise ConfigError(
                    f"no run starts from {files.directory}: its {name} is of kind {entry.kind}",
                    remedy="name a checkpoint in float32, bfloat16 or float16",
                )
