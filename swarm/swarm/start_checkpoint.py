"""Brings the checkpoint that a run starts from, and checks that its weights fit the run and are the pinned ones.

The checkpoint comes from a member's own directory, or from the hub by way of a cache. Functions block; no state. This
module is above `swarm.training`, since it uses the code that downloads and reads served models.

Shapes: N values of the flat parameter vector.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from swarm_protocol.errors import ConfigError, IntegrityError, SessionError
from torch import Tensor, nn

from swarm.serving.model.hub_download import OnProgress, download_blocks, find_model
from swarm.serving.model.model_files import ModelFiles, open_model
from swarm.serving.model.safetensors_reader import read_header
from swarm.serving.model.weights import needed_shards, read_model
from swarm.training.data.tokenizing import PreparationStopped
from swarm.training.run.layout import Layout
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import (
    build_model,
    check_computes,
    check_model,
    layout_of,
    model_keys,
    transformers_config,
    weights_digest,
)
from swarm.training.run.run_tables import StartConfig, has_no_effect
from swarm.training.state.replica_state import genesis_digest

_KINDS = frozenset({"F32", "F16", "BF16"})
"""The dtypes whose values fp32 represents exactly."""
MAX_VALUE_BYTES = 8
SPARE_BYTES = 64 << 20
"""Together, they bound a download: a run's author, who names it, is a stranger. A checkpoint has up to 4 bytes a
parameter; this allows as much again for what training does not use, such as other heads."""

_REMEDY = "copy [model] from the checkpoint: swarm-node run init FILE --start CHECKPOINT"
_OF_THE_FILE = frozenset(
    {"_name_or_path", "architectures", "auto_map", "dtype", "quantization_config", "transformers_version", "use_cache"}
)
"""Keys of a config that are no settings of its model."""
_WITHOUT_EFFECT = _OF_THE_FILE | {
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings")
}
"""Keys that do not change what the weights compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """The source of checkpoints: `place`, a directory of the member's own, or the hub by way of the folder `cache`.
    `on_progress` is called during downloads."""

    place: Path | None
    cache: Path
    on_progress: OnProgress = lambda _num_bytes, _total_bytes: None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPin:
    """The pin of a checkpoint, with the genesis of a run that starts from it. `differing` are the settings by which its
    config differs from the run's model."""

    revision: str
    digest: str
    genesis: str
    differing: tuple[str, ...]


def check_source(start: StartConfig, place: Path | None) -> None:
    """Raises ConfigError if a member names a directory that the run does not use."""
    if place is not None and not start.checkpoint:
        raise ConfigError(f"the run starts from no checkpoint, so {place} is not used", remedy="leave out --start")


def no_copy() -> ConfigError:
    """Return the refusal of a run whose checkpoint each member has to have, and which is not here."""
    return ConfigError(
        "the run starts from a checkpoint of which each member has its own copy",
        remedy="name its directory: --start DIR",
    )


def bringing(
    run: RunConfig, source: CheckpointSource, stop: Callable[[], bool] = lambda: False
) -> Callable[[], Tensor]:
    """Return a function that returns the weights that the run starts from, fp32 on the CPU, [N].

    Raises ConfigError for an invalid place. The returned function raises ConfigError if the checkpoint is unavailable
    or does not fit, IntegrityError if it is damaged or not the pinned one, and PreparationStopped where it downloads
    after `stop` returned True.
    """
    check_source(run.start, source.place)

    def downloading(num_bytes: int, total_bytes: int) -> None:
        if stop():
            raise SessionError(f"{run.start.checkpoint} is not whole")
        source.on_progress(num_bytes, total_bytes)

    def bring() -> Tensor:
        try:
            return start_theta(run, _read(_directory(run, replace(source, on_progress=downloading))))
        except SessionError as error:
            raise PreparationStopped from error

    return bring


def pin_of(run: RunConfig, source: CheckpointSource) -> CheckpointPin:
    """Return the pin of the run's checkpoint as it is now. Raises as the function of `bringing`."""
    check_model(run)
    directory = _directory(run, source)
    module = _read(directory)
    layout = fitting_layout(run, module)
    check_computes(module)
    _check_buffers(run, module)
    _, _, commit = open_model(directory).source.rpartition("@")
    if run.start.is_on_hub and not commit:
        raise ConfigError(
            f"{directory} does not say which commit of {run.start.checkpoint} it is",
            remedy='leave out --start, or set checkpoint = "local"',
        )
    differing = tuple(differing_settings(run, module.config))
    return CheckpointPin(
        revision=commit if run.start.is_on_hub else "",
        digest=weights_digest(module),
        genesis=genesis_digest(layout.flatten(module), run),
        differing=differing,
    )


def _directory(run: RunConfig, source: CheckpointSource) -> Path:
    """Return the directory of the checkpoint's files. They are downloaded if need be, once the config fits the run's
    model."""
    start = run.start
    if source.place is not None:
        return source.place
    if not start.is_on_hub:
        raise no_copy()
    endpoint = os.environ.get("HF_ENDPOINT")
    found = find_model(start.checkpoint, source.cache, revision=start.revision or "main", endpoint=endpoint)
    files = open_model(found.directory)
    layout = fitting_layout(run, files.whole_model)
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
    names = {name for name, _ in files.whole_model.named_parameters()}
    for shard in sorted(set(files.shards.values())):
        for name, entry in read_header(shard).items():
            if name in names and entry.kind not in _KINDS:
                raise ConfigError(
                    f"no run starts from {files.directory}: its {name} is of kind {entry.kind}",
                    remedy="name a checkpoint in float32, bfloat16 or float16",
                )


def start_theta(run: RunConfig, module: nn.Module) -> Tensor:
    """Return the weights of `module`, the model of the run's checkpoint, as replicas start from them: fp32 CPU [N].

    Raises ConfigError if they do not fit the run's model or the run does not pin them, IntegrityError if the run pins
    others.
    """
    layout = fitting_layout(run, module)
    if not run.start.digest:
        raise ConfigError(
            "the run does not pin the checkpoint that it starts from",
            remedy="ask its author to sign it with swarm-node run sign",
        )
    if (digest := weights_digest(module)) != run.start.digest:
        raise IntegrityError(
            f"the checkpoint has other weights than those that the run starts from: {digest[:12]} instead of "
            f"{run.start.digest[:12]}",
            remedy="bring the checkpoint that the run's author signed for",
        )
    return layout.flatten(module)


def fitting_layout(run: RunConfig, module: nn.Module) -> Layout:
    """Return the layout of the run's model. Raises ConfigError unless `module` has its parameters, tied as there."""
    layout = layout_of(run)
    wanted = dict(zip(layout.names, layout.shapes, strict=True))
    found = {name: parameter.shape for name, parameter in module.named_parameters()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) == found.get(name):
            continue
        here, there = (str(tuple(each[name])) if name in each else "missing" for each in (wanted, found))
        differing = ", ".join(differing_settings(run, module.config)) or "no setting"
        raise ConfigError(
            f"the checkpoint does not fit [model]: {name} is {there} in it and {here} in the run; "
            f"their configs differ in {differing}",
            remedy=_REMEDY,
        )
    return layout


def _check_buffers(run: RunConfig, module: nn.Module) -> None:
    """Raises ConfigError for a checkpoint with trained values besides its parameters, which no run's state has. Such
    are the biases by which DeepSeek-V3's routers balance their experts."""
    found = _buffers(module)
    if not any(bool(values.any()) for values in found.values()):
        return  # as in a model that is just built
    fresh = _buffers(build_model(run.model))
    trained = [name for name, x in found.items() if not torch.allclose(x.float(), fresh[name].float(), rtol=0.01)]
    if trained:
        raise ConfigError(
            f"the checkpoint's {trained[0]} is no parameter: members would train without it",
            remedy="start from a checkpoint of another family, or from random weights",
        )


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the values of a checkpoint that are not parameters."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: values for name, values in module.state_dict().items() if name not in parameters}


def differing_settings(run: RunConfig, config: Any) -> list[str]:
    """Return the settings by which `config`, a checkpoint's, computes something different from the run's [model]."""
    mine, theirs = transformers_config(run.model).to_dict(), config.to_dict()
    if mine["model_type"] != theirs["model_type"]:
        return ["model_type"]
    names = {name for name in mine.keys() | theirs.keys() if not (has_no_effect(name) or name.startswith("_"))}
    names -= _WITHOUT_EFFECT
    return sorted(name for name in names if mine.get(name) != theirs.get(name))


def model_settings(config: Any) -> dict[str, Any]:
    """Return the keys of [model] that describe `config`, a checkpoint's: those of its family that differ from
    the defaults."""
    settings = {"model_type": config.model_type, **_without_none(config.to_diff_dict())}
    known = model_keys(config.model_type) - _OF_THE_FILE
    return {key: value for key, value in settings.items() if key in known and not has_no_effect(key)}


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is None, which TOML cannot hold."""
    return {
        key: _without_none(each) if isinstance(each, dict) else each for key, each in value.items() if each is not None
    }
