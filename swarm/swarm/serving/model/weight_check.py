"""Check that a model's directory has all weights of its config, from the files' headers alone.

Where a family stores its weights under other names than transformers gives them, or quantized, only whole blocks are
looked for; what lacks inside of one is then told when it is loaded. No weights are read.
"""

from __future__ import annotations

import copy

import torch
from swarm_protocol.errors import IntegrityError

from swarm.building import BUILDING
from swarm.serving.model.model_files import ModelFiles
from swarm.serving.model.safetensors_reader import read_header
from swarm.serving.model.weights import block_of_tensors, causal_lm_class, quiet_transformers

MAX_NAMED = 3
"""Tensors that a message names; it counts the others."""


def check_weights(files: ModelFiles) -> None:
    """Raises IntegrityError that names the tensors that are missing, and the file that should have them if that is
    known."""
    for shard in sorted(set(files.shards.values())):
        there = read_header(shard)
        lacking = [name for name, path in files.shards.items() if path == shard and name not in there]
        if lacking:
            raise IntegrityError(f"{shard} lacks {_named(lacking)}", remedy="download it again")
    with quiet_transformers():
        lacking = _absent_tensors(files) or _absent_blocks(files)
    if lacking:
        raise IntegrityError(f"{files.directory} lacks {_named(lacking)}", remedy="download the model again")


def _absent_tensors(files: ModelFiles) -> list[str]:
    """Return the tensors of the whole model that no file has; none where the checkpoint's names are not the model's."""
    with BUILDING, torch.device("meta"):
        model = causal_lm_class(files.config)(copy.deepcopy(files.config))
    prefix, tied = f"{model.base_model_prefix}.", getattr(model, "all_tied_weights_keys", None) or {}
    known = {name.removeprefix(prefix): name for name in model.state_dict()}
    found = {name.removeprefix(prefix) for name in files.shards}
    if files.format is not None or not found <= known.keys():
        return []
    return [name for short, name in known.items() if short not in found and name not in tied]


def _absent_blocks(files: ModelFiles) -> list[str]:
    found = set(block_of_tensors(files).values())
    return [f"block {block}" for block in range(files.num_blocks) if block not in found]


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
