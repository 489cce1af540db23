"""Cuts a transformers model down to some of its blocks.

The model is built whole on the meta device, where it costs no memory, and then cut: building first keeps what a family
derives from a block's absolute index (which blocks are experts, how attention is scaled) as in the whole model.
Leaves reading weights to `blocks`. Pure but for changing the model it is given.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from swarm_protocol.errors import ConfigError
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from swarm.serving.model.formats.registry import format_of

_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}

_BEFORE_BLOCKS = {("bloom", "word_embeddings_layernorm"): True, ("opt", "final_layer_norm"): False}
"""By family and module, where order and kind do not tell."""


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
    list_name = path.rpartition(".")[2]
    is_first, is_last = start == 0, end == len(blocks)
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for name, module in list(parent.named_children()):
        if name == list_name or _is_computed(module):
            continue
        if module is model.get_input_embeddings():
            stays = is_first or (is_last and is_tied)
        else:
            stays = is_first if _is_before_blocks(model, parent, name, list_name) else is_last
        if not stays:
            setattr(parent, name, _Absent(is_embedding=isinstance(module, nn.Embedding)))
    if not is_last:
        model.set_output_embeddings(_Absent(is_embedding=False))
        model.all_tied_weights_keys = {}
    setattr(parent, list_name, blocks[start:end])
    for module in blocks[start:end].modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            module.layer_idx = index - start  # type: ignore[assignment]
    _cut_config(model.config, start, end)


def _is_computed(module: nn.Module) -> bool:
    """Not learnt and needed by every block: rotary embeddings, dropout. A norm may be without weights too (OLMo)."""
    return next(module.parameters(), None) is None and "Norm" not in type(module).__name__


def _is_before_blocks(model: Any, parent: nn.Module, name: str, list_name: str) -> bool:
    """Whether the model applies this module to its input or to its output, which no family declares.

    Modules are written down in the order of use, and only embeddings come first. Where both signs do not agree the
    family must be one whose code was read, or is refused.
    """
    known = _BEFORE_BLOCKS.get((model.config.model_type, name))
    if known is not None:
        return known
    names = [child for child, _ in parent.named_children()]
    is_before = names.index(name) < names.index(list_name)
    if is_before != isinstance(parent.get_submodule(name), nn.Embedding):
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

    def forward(self, x: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        return torch.zeros((), device=x.device) if self._is_embedding else x
