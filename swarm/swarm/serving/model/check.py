"""Says from a model's config alone whether its blocks can be served, before any weights are had. Blocking; no state."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

from swarm.building import BUILDING
from swarm.serving.model.cut import causal_lm_class, cut, quiet_transformers
from swarm.serving.model.model_files import check_is_model, read_config
from swarm.serving.model.safetensors_reader import one_line
from swarm.serving.model.shape import check_span
from swarm.serving.model.trial import NotTriedError, try_in_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A model that can be served. `family` is transformers' `model_type`.

    `untried` says why its blocks could not be tried out from the config; then they are when they are loaded.
    """

    family: str
    num_blocks: int
    untried: str = ""


def check_directory(directory: Path, blocks: tuple[int, int] | None = None) -> Checked:
    """As `check_config`, for the config.json in `directory`, and for the span of it that is to be served."""
    with quiet_transformers():
        config = read_config(directory)
    if blocks is not None:
        check_span(*blocks, int(config.num_hidden_layers))
    return check_config(config)


def check_config(config: Any) -> Checked:
    """Raises ConfigError for a model that cannot be served, with the reason. `config` is left as it is."""
    check_is_model(config)
    causal_lm_class(config)
    num_blocks = int(config.num_hidden_layers)
    if num_blocks > limits.MAX_BLOCKS:
        raise ConfigError(f"{num_blocks} blocks are more than {limits.MAX_BLOCKS}", remedy="serve another model")
    untried = _untried(type(config), config.to_json_string(use_diff=False))  # type: ignore[arg-type]
    return Checked(family=str(config.model_type), num_blocks=num_blocks, untried=untried)


@lru_cache(maxsize=64)  # `join` asks before it meets peers, and again for each span that is loaded
def _untried(kind: Any, settings: str) -> str:
    """Why the config's blocks could not be tried out; empty: they were. Raises ConfigError if they cannot be served."""
    config = kind.from_dict(json.loads(settings))
    try:
        try_in_parts(config)
    except NotTriedError as error:
        _check_structure(config)
        return str(error)
    return ""


def _check_structure(config: Any) -> None:
    """Raises ConfigError for a model that cannot be built, or whose modules cannot be told apart."""
    model_class = causal_lm_class(config)
    try:
        with BUILDING, quiet_transformers(), torch.device("meta"):
            cut(model_class(copy.deepcopy(config)), 0, 1)
    except ConfigError:
        raise
    except Exception as error:  # a family's own code raises what it likes
        raise ConfigError(
            f"transformers cannot build a {config.model_type} from this config: {one_line(error)}",
            remedy="restore the file that came with the model, or serve another one",
        ) from error
