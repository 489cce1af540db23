"""Says from a model's config alone whether its blocks can be served, before any weights are had. Blocking; no state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from swarm.building import BUILDING
from swarm.serving.model.cut import causal_lm_class, cut
from swarm.serving.model.files import read_config


@dataclass(frozen=True, slots=True)
class Checked:
    """A model that can be served. `family` is transformers' `model_type`."""

    family: str
    num_blocks: int


def check_directory(directory: Path) -> Checked:
    """Raises ConfigError for a model that cannot be served, with the reason."""
    config = read_config(directory)
    checked = Checked(str(config.model_type), int(config.num_hidden_layers))
    with BUILDING, torch.device("meta"):
        cut(causal_lm_class(config)(config), 0, 1)
    return checked
