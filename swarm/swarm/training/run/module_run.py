"""Runs of a module of their author's own, which no file describes: members bring it, and the run says which it must be.

    [model]
    model_type = "module"
    num_values = 1234      # of all parameters
    digest = "…"           # of the weights that the run begins with
    num_samples = 60000    # of the data set; 0: members train on streams of their own

Values and checks only; `swarm.trainer` trains such runs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import nn

from swarm.training.run.run_config import RunConfig
from swarm.training.run.setting_checks import refuse_unknown_keys
from swarm.training.state.layout import Layout
from swarm.training.state.manifest import MAX_STATE_VALUES

MODULE_TYPE = "module"
MAX_SAMPLES = 1 << 48
_KEYS = ("model_type", "num_values", "digest", "num_samples")


def is_module_run(config: RunConfig) -> bool:
    return config.model.get("model_type") == MODULE_TYPE


def module_run(config: RunConfig, module: nn.Module, *, num_samples: int = 0) -> RunConfig:
    """`config` for training `module`, from the weights that it has now, on a data set of `num_samples` (0: on streams).

    A sample counts as one token. Raises ConfigError if the module cannot be trained so.
    """
    layout = Layout.of(module, config.fragments)
    model = {
        "model_type": MODULE_TYPE,
        "num_values": layout.num_values,
        "digest": weights_digest(module),
        "num_samples": num_samples,
    }
    run = replace(config, model=model, data=replace(config.data, window_tokens=1))
    check_module_run(run)
    return run


def check_module_run(config: RunConfig) -> int:
    """The number of parameters. Raises ConfigError."""
    model = config.model
    if config.start.checkpoint:
        raise ConfigError(
            "[start] is for models that a file describes: this run's module brings its own first weights",
            remedy="load the checkpoint into the module before module_run, and leave out [start]",
        )
    refuse_unknown_keys(model, _KEYS, "[model], which is a module,")
    num_values, digest, num_samples = model.get("num_values"), model.get("digest"), model.get("num_samples", 0)
    if type(num_values) is not int or not 1 <= num_values <= MAX_STATE_VALUES:
        raise ConfigError(
            f"[model] num_values = {num_values!r}", remedy=f"use the number of parameters, 1 to {MAX_STATE_VALUES}"
        )
    if not isinstance(digest, str) or re.fullmatch("[0-9a-f]{64}", digest) is None:
        raise ConfigError(f"[model] digest = {digest!r}", remedy="swarm.trainer.module_run fills it in")
    if type(num_samples) is not int or not 0 <= num_samples <= MAX_SAMPLES:
        raise ConfigError(f"[model] num_samples = {num_samples!r}", remedy="use the data set's length, or 0")
    return num_values


def refuse_module_run(model: Mapping[str, Any]) -> None:
    """Raises ConfigError where only what a file describes can be trained."""
    if model.get("model_type") == MODULE_TYPE:
        raise ConfigError(
            "the run trains a module of its author's own, which is not in the file",
            remedy="train it from Python, where the module is: swarm.Trainer(RUN, peers=…, model=…, …)",
        )


def check_weights(config: RunConfig, module: nn.Module) -> None:
    """Raises IntegrityError unless `module` is what the run begins with."""
    num_values = sum(parameter.numel() for parameter in module.parameters())
    if num_values != config.model["num_values"]:
        raise IntegrityError(
            f"the module has {num_values} parameters, and the run's has {config.model['num_values']}",
            remedy="bring the module that the run was made for",
        )
    if (digest := weights_digest(module)) != config.model["digest"]:
        raise IntegrityError(
            f"the module starts from other weights than the run's: {digest[:12]} instead of "
            f"{config.model['digest'][:12]}",
            remedy="load the weights that the run was made with, such as from a file of its author",
        )


def weights_digest(module: nn.Module) -> str:
    """Of names, shapes and values of all parameters as fp32, in the names' order."""
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()
