"""Blocks `[start, end)` of a transformers model, with only their own weights in memory.

The family's own modules compute, so masks, rotary embeddings and caches are transformers'; its own loader reads, so
that old checkpoint layouts are converted. What `model_cut` cut off is never read.

Leaves scheduling to `engine` and the wire to `session_server`. Not thread-safe: one thread runs a span.
Legend of shapes: T positions of this step, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.utils import logging as transformers_logging

from swarm.building import BUILDING
from swarm.serving.model_cut import block_list, block_pattern, causal_lm_class, cut
from swarm.serving.model_files import ModelFiles


class Want(IntEnum):
    """Which outputs of a step its caller needs."""

    NOTHING = 0
    LAST = 1
    ALL = 2


class KVCache:
    """Keys and values of one session on one span."""

    def __init__(self, cache: DynamicCache) -> None:
        self.entries = cache

    @property
    def length(self) -> int:
        """Number of positions held."""
        return int(self.entries.get_seq_length())

    @property
    def num_bytes(self) -> int:
        tensors = (t for layer in self.entries.layers for t in (layer.keys, layer.values))
        return sum(t.nbytes for t in tensors if t is not None)

    def free(self) -> None:
        """Give the memory back now, whoever still holds this object. A step that is running keeps it to its end."""
        self.entries = DynamicCache()


class Span:
    """Blocks `[start, end)` of a model of `num_blocks`, ready to run."""

    def __init__(self, model: Any, start: int, end: int, num_blocks: int) -> None:
        self._model = model
        self.start = start
        self.end = end
        self.num_blocks = num_blocks
        self.hidden_size = int(model.config.hidden_size)
        self.vocab_size = int(model.config.vocab_size)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.device: torch.device = next(model.parameters()).device

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_blocks

    def new_cache(self) -> KVCache:
        return KVCache(DynamicCache(config=self._model.config))

    def view(self, start: int, end: int) -> Span:
        """Some of this span's blocks as a span of its own, sharing the weights."""
        assert self.start <= start < end <= self.end
        if (start, end) == (self.start, self.end):
            return self
        tensors = [*self._model.parameters(), *self._model.buffers()]
        model = copy.deepcopy(self._model, {id(tensor): tensor for tensor in tensors})
        cut(model, start - self.start, end - self.start)
        return Span(model, start, end, self.num_blocks)

    @torch.inference_mode()
    def run(self, x: Tensor, cache: KVCache, want: Want = Want.ALL) -> Tensor | None:
        """Append T positions to `cache` and return what `want` asks for.

        `x` is int64 token ids [T] for the first span, else hidden states [T, H], on any device and of any float type.
        Returns hidden states [T, H], or logits from the last span: [T, V], or [1, V] for `Want.LAST`.
        """
        x = x.to(self.device, self.dtype if x.is_floating_point() else None)
        if self.is_first:
            out = self._forward({"input_ids": x[None]}, cache, want)
        else:
            with _entering(block_list(self._model)[2][0], x[None]):
                out = self._forward({"inputs_embeds": x[None]}, cache, want)
        if want is Want.NOTHING:
            return None
        return out[0, -1:] if want is Want.LAST else out[0]

    def _forward(self, inputs: dict[str, Tensor], cache: KVCache, want: Want) -> Tensor:
        inputs_and_cache = {**inputs, "past_key_values": cache.entries, "use_cache": True}
        if self.is_last and want is not Want.NOTHING:
            logits: Tensor = self._model(**inputs_and_cache, logits_to_keep=1 if want is Want.LAST else 0).logits
            return logits
        hidden: Tensor = self._model.base_model(**inputs_and_cache).last_hidden_state
        return hidden


@contextmanager
def _entering(block: nn.Module, hidden_BTH: Tensor) -> Iterator[None]:
    """Give `block` exactly `hidden_BTH`, past whatever the model does to its embeddings (Granite scales them)."""

    def replace(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (hidden_BTH, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden_BTH}

    handle = block.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def load_span(
    files: ModelFiles,
    start: int,
    end: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Span:
    """Read blocks `[start, end)`, the embedding for block 0 and the norm and head for the last block.

    Raises ConfigError for a span or a family that cannot be served, IntegrityError for a missing, misshapen or
    unreadable tensor, naming it and its file.
    """
    num_blocks = files.num_blocks
    if not 0 <= start < end <= num_blocks:
        raise ConfigError(f"blocks {start}:{end} are not within this model's 0:{num_blocks}")
    model_class = causal_lm_class(files.config)

    def build_and_cut(self: Any, config: Any) -> None:
        model_class.__init__(self, config)
        cut(self, start, end)

    # A subclass of the same name: transformers looks up a family's checkpoint conversions by class name.
    cut_class = type(
        model_class.__name__, (model_class,), {"__init__": build_and_cut, "__module__": model_class.__module__}
    )
    with BUILDING, ExitStack() as stack:
        tensors = _open_tensors(files, _needed_tensors(files, model_class, start, end), stack)
        model = _materialise(files, cut_class, tensors, start, dtype)
    return Span(model.to(device).eval().requires_grad_(False), start, end, num_blocks)


def block_of_tensors(files: ModelFiles) -> dict[str, int | None]:
    """For each tensor of the checkpoint the block it belongs to, None for embedding, norm and head."""
    with BUILDING, torch.device("meta"):
        model = causal_lm_class(files.config)(copy.deepcopy(files.config))
    pattern = block_pattern(model)
    return {name: int(match[2]) if (match := pattern.match(name)) else None for name in files.shards}


def _needed_tensors(files: ModelFiles, model_class: Any, start: int, end: int) -> dict[str, str]:
    """The span's tensors: name in the cut model -> name in the checkpoint."""
    with torch.device("meta"):  # BUILDING is held by the caller
        model = model_class(copy.deepcopy(files.config))
    pattern, prefix = block_pattern(model), f"{model.base_model_prefix}."
    before = {name.removeprefix(prefix) for name in model.state_dict()}
    cut(model, start, end)
    absent = before - {name.removeprefix(prefix) for name in model.state_dict()}
    needed = {}
    for name in files.shards:
        if match := pattern.match(name):
            if start <= int(match[2]) < end:
                needed[f"{match[1]}{int(match[2]) - start}{match[3]}"] = name
        elif name.removeprefix(prefix) not in absent:
            needed[name] = name
    return needed


def _open_tensors(files: ModelFiles, needed: dict[str, str], stack: ExitStack) -> dict[str, Any]:
    """Lazy slices: a tensor's bytes are read when its parameter is filled, one at a time."""
    opened: dict[Path, Any] = {}
    for shard in sorted({files.shards[name] for name in needed.values()}):
        try:
            opened[shard] = stack.enter_context(safe_open(shard, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise IntegrityError(f"{shard} is damaged: {error}", remedy="download it again") from error
    return {new: _lazy(opened[files.shards[old]], files, old) for new, old in needed.items()}


def _lazy(file: Any, files: ModelFiles, name: str) -> Any:
    try:
        return file.get_slice(name)
    except SafetensorError as error:
        raise IntegrityError(f"{files.shards[name]} lacks the tensor {name}", remedy="download it again") from error


def _materialise(files: ModelFiles, cut_class: Any, tensors: dict[str, Any], start: int, dtype: torch.dtype) -> Any:
    with _quiet_transformers():
        try:
            model, info = cut_class.from_pretrained(
                None,
                config=copy.deepcopy(files.config),
                state_dict=tensors,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported, so that they can be named
            )
        except (RuntimeError, ValueError, SafetensorError) as error:
            raise IntegrityError(f"the weights in {files.directory} do not fit its config: {error}") from error
    pattern = block_pattern(model)
    wrong = [
        f"{match[1]}{int(match[2]) + start}{match[3]}" if (match := pattern.match(name)) else name
        for name in sorted(info["missing_keys"] | {name for name, *_ in info["mismatched_keys"]})
    ]
    if wrong or info["error_msgs"]:
        raise IntegrityError(
            f"{files.directory} lacks tensors of the right shape for {', '.join(wrong[:4] or info['error_msgs'])}"
            f"{' and more' * (len(wrong) > 4)}",
            remedy="download the model again",
        )
    stranded = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if stranded:
        raise ConfigError(
            f"{files.config.model_type} leaves {stranded[0]} without a value", remedy="serve another family"
        )
    return model


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the library's own progress bars and load reports: failures are raised, and named, here."""
    had_bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
