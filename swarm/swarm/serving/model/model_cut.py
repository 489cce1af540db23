"""Cuts a transformers model to a span: its blocks, the embedding for the first one, and norm and head for the last one.
`ModelPart` then runs any of the blocks that are left.

Families name and order these parts in their own ways, and declare little of it. Pure, on models of any device. Shapes:
B sequences, T positions of each, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


class ModelPart:
    """A model that was cut to `blocks`, of which it runs those in `chosen`, [start, end). Block `first` of `num_blocks`
    is the first one."""

    def __init__(self, model: Any, first: int, num_blocks: int) -> None:
        path, self._parent, self.blocks = block_list(model)
        self.chosen = first, first + len(self.blocks)
        self._model = model
        self._first = first
        self._num_blocks = num_blocks
        self._list_name = path.rpartition(".")[2]
        self._layer_types = list(getattr(model.config, "layer_types", None) or ())
        self._own_attention = model.config._attn_implementation
        self._wraps_outputs = False  # whether the blocks return tuples, once one has run

    def choose(self, start: int, end: int) -> None:
        """Make the model consist of blocks [start, end), until other blocks are chosen."""
        if (start, end) == self.chosen:
            return
        assert self._first <= start < end <= self._first + len(self.blocks)
        part = slice(start - self._first, end - self._first)
        setattr(self._parent, self._list_name, self.blocks[part])
        if self._layer_types:
            self._model.config.layer_types = self._layer_types[part]
        self._model.config.num_hidden_layers = end - start
        self.chosen = (start, end)

    def attend_with(self, implementation: str | None) -> None:
        """Let the blocks attend in this way, or if it is None as the model does by itself."""
        config, wanted = self._model.config, implementation or self._own_attention
        if config._attn_implementation != wanted:
            config._attn_implementation = wanted

    @contextmanager
    def inputs(self, x_BT: Tensor, *, keeps_last: bool = False) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Yield the model's inputs for `x`, and a list that gets the last chosen block's output. That of the model's
        last block is kept only with `keeps_last`."""
        start, end = self.chosen
        output: list[Tensor] = []

        def enter(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            # exactly `x_BT`, whatever the model does to its embeddings (Granite scales them)
            return ((x_BT, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x_BT})

        def keep(_block: nn.Module, _inputs: Any, result: Any) -> None:
            self._wraps_outputs = isinstance(result, tuple)
            output.append(result[0] if isinstance(result, tuple) else result)

        with ExitStack() as stack:
            if start > 0:
                first = self.blocks[start - self._first]
                stack.callback(first.register_forward_pre_hook(enter, with_kwargs=True).remove)
            if end < self._num_blocks or keeps_last:  # the model may process the output of its last block further
                last = self.blocks[end - self._first - 1]
                stack.callback(last.register_forward_hook(keep).remove)
            if x_BT.is_floating_point():
                yield {"inputs_embeds": x_BT.clone()}, output  # CTRL scales its input in place
            else:
                yield {"input_ids": x_BT}, output

    @contextmanager
    def returning(self, output_BTH: Tensor) -> Iterator[None]:
        """Let the last block return `output_BTH` without computing."""
        attributes = vars(self.blocks[-1])
        attributes["forward"] = lambda *_args, **_kwargs: (output_BTH,) if self._wraps_outputs else output_BTH
        try:
            yield
        finally:
            del attributes["forward"]
