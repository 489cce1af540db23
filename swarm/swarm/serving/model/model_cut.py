"""Cuts a transformers model to a span: its blocks, the embedding for the first one, and norm and head for the last one.

Families name and order these parts in their own ways, and declare little of it. Pure, on models of any device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from swarm_protocol.errors import ConfigError
from torch import Tensor, nn

_BEFORE_BLOCKS = {("bloom", "word_embeddings_layernorm"): True, ("opt", "final_layer_norm"): False}
"""The place of a module (True: before the blocks) by family and name, for modules whose order and kind do not show
it."""

_INDEX_NAMES = ("layer_idx", "layer_id")
"""Names that families give to the index under which a block keeps its keys and values."""


def block_list(model: Any) -> tuple[str, nn.Module, nn.ModuleList]:
    """Return the path of the list of blocks within the base model, its parent, and the list. Raises ConfigError."""
    base = model.base_model
    if base is model:
        raise ConfigError(
            f"{model.config.model_type} does not separate the model from its head", remedy="serve another family"
        )
    for path, module in base.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            parent_path, _, _ = path.rpartition(".")
            return path, base.get_submodule(parent_path), module
    raise ConfigError(f"{model.config.model_type} has no list of its blocks", remedy="serve another family")


def block_pattern(model: Any) -> re.Pattern[str]:
    """Return a pattern for names of tensors in blocks, with three groups: before the index, the index, after it."""
    prefix, path = re.escape(model.base_model_prefix), re.escape(block_list(model)[0])
    return re.compile(rf"^((?:{prefix}\.)?{path}\.)(\d+)(\..+)$")


def cut(model: Any, start: int, end: int) -> None:
    """Cut `model` to blocks `[start, end)`, with the embedding for the first block and the head for the last one."""
    path, parent, blocks = block_list(model)
    for owner, name, module in list(modules_beyond(model, start, end)):
        setattr(owner, name, _Absent(is_embedding=isinstance(module, nn.Embedding)))
    if end < len(blocks):
        model.all_tied_weights_keys = {}
        model._is_hf_initialized = True  # some families' initialization also accesses the head, which may be cut
    setattr(parent, path.rpartition(".")[2], blocks[start:end])
    for module in blocks[start:end].modules():
        for name in _INDEX_NAMES:
            if isinstance(index := getattr(module, name, None), int):
                setattr(module, name, index - start)
    _cut_config(model.config, start, end)


def modules_beyond(model: Any, start: int, end: int) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield owner, name and module of the modules around the blocks that `[start, end)` does not need."""
    path, _, blocks = block_list(model)
    is_first, is_last = start == 0, end == len(blocks)
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    embedding = model.get_input_embeddings()
    for owner, way in _owners(model, path):
        for name, module in owner.named_children():
            if name == way or next(module.parameters(), None) is None:
                continue  # modules without weights cost nothing, and some are used before and after the blocks
            if any(part is embedding for part in module.modules()):
                stays = is_first or (is_last and is_tied)
            else:
                stays = is_first if owner is not model and _is_before_blocks(model, owner, name, way) else is_last
            if not stays:
                yield owner, name, module


def _owners(model: Any, path: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules around the list of blocks, from the model inwards, each with the name of the child that leads
    to the list."""
    owner: nn.Module = model
    for way in [model.base_model_prefix, *path.split(".")]:
        yield owner, way
        owner = owner.get_submodule(way)


def _is_before_blocks(model: Any, owner: nn.Module, name: str, way: str) -> bool:
    """Return whether the model applies this module before its blocks, or after them. No family declares this.

    Modules are defined in the order of their use, and only embeddings come before the blocks. A family in which both
    signs disagree is refused, unless _BEFORE_BLOCKS has it.
    """
    known = _BEFORE_BLOCKS.get((model.config.model_type, name))
    if known is not None:
        return known
    names = [child for child, _ in owner.named_children()]
    is_before = names.index(name) < names.index(way)
    if is_before != isinstance(owner.get_submodule(name), nn.Embedding):
        raise ConfigError(
            f"{model.config.model_type} keeps {name} where it cannot be split", remedy="serve another family"
        )
    return is_before


def _cut_config(config: Any, start: int, end: int) -> None:
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types[start:end])
    config.num_hidden_layers = end - start


class _Absent(nn.Module):
    """Replaces a module that was cut off, and accepts any call. It returns its input; as a positional embedding,
    zero."""

    def __init__(self, *, is_embedding: bool) -> None:
        super().__init__()
        self._is_embedding = is_embedding

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if self._is_embedding:
            return torch.zeros((), device=given[0].device)
        return next((value for value in given if value.is_floating_point()), given[0])
