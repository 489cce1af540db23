"""Cut a transformers model down to some of its blocks.

The model is built whole on the meta device, where it takes no memory, and then cut. Building it whole keeps what a
family derives from a block's absolute index (which blocks are experts, how attention is scaled). `weights` reads the
tensors. The functions keep no state; `cut` changes the model it is given.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from swarm_protocol.errors import ConfigError
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from swarm.serving.model.formats import format_of

_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}

_BEFORE_BLOCKS = {("bloom", "word_embeddings_layernorm"): True, ("opt", "final_layer_norm"): False}
"""The place of a module (True: before the blocks) by family and name, where its order and kind do not show it."""

_INDEX_NAMES = ("layer_idx", "layer_id")
"""Names that families give to the index under which a block keeps its keys and values."""


def causal_lm_class(config: Any) -> Any:
    """The transformers class for `config`. Raises ConfigError for what is no model of blocks that can be split."""
    name = str(config.model_type)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise ConfigError(f"{name} is not a decoder-only language model", remedy="serve a causal language model")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types <= _SUPPORTED_LAYER_TYPES or getattr(config, "num_kv_shared_layers", None):
        raise ConfigError(f"{name} has blocks that share state and cannot be split", remedy="serve another family")
    format_of(config)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def block_list(model: Any) -> tuple[str, nn.Module, nn.ModuleList]:
    """Path within the base model, parent and list of the blocks."""
    base = model.base_model
    if base is model:
        raise ConfigError(
            f"{model.config.model_type} keeps no model apart from its head", remedy="serve another family"
        )
    for path, module in base.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            parent_path, _, _ = path.rpartition(".")
            return path, base.get_submodule(parent_path), module
    raise ConfigError(f"{model.config.model_type} keeps its blocks in no list", remedy="serve another family")


def block_pattern(model: Any) -> re.Pattern[str]:
    """Matches the names of tensors in blocks: what comes before the index, the index, what comes after."""
    prefix, path = re.escape(model.base_model_prefix), re.escape(block_list(model)[0])
    return re.compile(rf"^((?:{prefix}\.)?{path}\.)(\d+)(\..+)$")


def cut(model: Any, start: int, end: int) -> None:
    """Leave only blocks `[start, end)`, and the embedding and head where they belong to them."""
    path, parent, blocks = block_list(model)
    is_first, is_last = start == 0, end == len(blocks)
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    embedding = model.get_input_embeddings()
    for owner, way in _owners(model, path):
        for name, module in list(owner.named_children()):
            if name == way or next(module.parameters(), None) is None:
                continue  # what has no weights costs nothing, and some is used before and after the blocks
            if any(part is embedding for part in module.modules()):
                stays = is_first or (is_last and is_tied)
            else:
                stays = is_first if owner is not model and _is_before_blocks(model, owner, name, way) else is_last
            if not stays:
                setattr(owner, name, _Absent(is_embedding=isinstance(module, nn.Embedding)))
    if not is_last:
        model.all_tied_weights_keys = {}
        model._is_hf_initialized = True  # some families' initialization reaches from the model into its head
    setattr(parent, path.rpartition(".")[2], blocks[start:end])
    for module in blocks[start:end].modules():
        for name in _INDEX_NAMES:
            if isinstance(index := getattr(module, name, None), int):
                setattr(module, name, index - start)
    _cut_config(model.config, start, end)


def _owners(model: Any, path: str) -> Iterator[tuple[nn.Module, str]]:
    """The modules around the list of blocks, from the model inwards, with the child that leads to the list."""
    owner: nn.Module = model
    for way in [model.base_model_prefix, *path.split(".")]:
        yield owner, way
        owner = owner.get_submodule(way)


def _is_before_blocks(model: Any, owner: nn.Module, name: str, way: str) -> bool:
    """Return whether the model applies this module before its blocks, or after them, which no family declares.

    Modules are written down in the order of use, and only embeddings come first. Where both signs do not agree the
    family must be one whose code was read, or is refused.
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
    """Stands where a module was cut off, whatever it is called with: what a positional embedding adds is nothing."""

    def __init__(self, *, is_embedding: bool) -> None:
        super().__init__()
        self._is_embedding = is_embedding

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if self._is_embedding:
            return torch.zeros((), device=given[0].device)
        return next((value for value in given if value.is_floating_point()), given[0])


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' progress bars and load reports, since failures are raised here, and torchao's log of
    kernels for other machines."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    had_bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
