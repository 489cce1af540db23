"""Blocks `[start, end)` of a transformers model, with only their own weights in memory.

The family's own modules compute, so masks, rotary embeddings and caches are transformers'. The model class is built
whole on the meta device, where it costs no memory, then cut: building first keeps what a family derives from a
block's absolute index (which blocks are experts, how attention is scaled) as in the whole model. What was cut off
is never read.

Leaves scheduling to `engine` and the wire to `session_server`. Not thread-safe: one thread runs a span.
Legend of shapes: T positions of this step, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache
from transformers.utils import logging as transformers_logging

from swarm.serving.model_files import ModelFiles

_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


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

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on.

        Raises ConfigError where a sliding window has already forgotten what would become visible again.
        """
        surplus = self.length - length
        assert surplus >= 0
        try:
            self.entries.crop(-surplus)
        except RuntimeError as error:
            raise ConfigError(f"a sliding window cannot go back to position {length}") from error


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
        _cut(model, start - self.start, end - self.start)
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
            with _entering(_block_list(self._model)[2][0], x[None]):
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


class _Absent(nn.Module):
    """Stands where a module was cut off. What a positional embedding there would add is nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.is_floating_point() else torch.zeros((), device=x.device)


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
    model_class = _model_class(files)

    def build_and_cut(self: Any, config: Any) -> None:
        model_class.__init__(self, config)
        _cut(self, start, end)

    # A subclass of the same name: transformers looks up a family's checkpoint conversions by class name.
    cut_class = type(
        model_class.__name__, (model_class,), {"__init__": build_and_cut, "__module__": model_class.__module__}
    )
    with ExitStack() as stack:
        tensors = _open_tensors(files, _needed_tensors(files, model_class, start, end), stack)
        model = _materialise(files, cut_class, tensors, dtype)
    return Span(model.to(device).eval().requires_grad_(False), start, end, num_blocks)


def _model_class(files: ModelFiles) -> Any:
    config = files.config
    name = str(config.model_type)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise ConfigError(f"{name} is not a decoder-only language model", remedy="serve a causal language model")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types <= _SUPPORTED_LAYER_TYPES or getattr(config, "num_kv_shared_layers", None):
        raise ConfigError(f"{name} has blocks that share state and cannot be split", remedy="serve another family")
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{files.directory} is quantized", remedy="serve the unquantized checkpoint")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _block_list(model: Any) -> tuple[str, nn.Module, nn.ModuleList]:
    """Path within the base model, parent and list of the blocks."""
    base = model.base_model
    for path, module in base.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            parent_path, _, _ = path.rpartition(".")
            return path, base.get_submodule(parent_path), module
    raise ConfigError(f"{model.config.model_type} keeps its blocks in no list", remedy="serve another family")


def _cut(model: Any, start: int, end: int) -> None:
    """Leave only blocks `[start, end)`, and the embedding and head where they belong to them."""
    path, parent, blocks = _block_list(model)
    list_name = path.rpartition(".")[2]
    is_first, is_last = start == 0, end == len(blocks)
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for name, module in list(parent.named_children()):
        # without parameters it is computed, not learnt: rotary embeddings, dropout
        if name == list_name or next(module.parameters(), None) is None:
            continue
        if module is model.get_input_embeddings():
            stays = is_first or (is_last and is_tied)
        else:
            stays = is_first if _is_before_blocks(model, parent, name, list_name) else is_last
        if not stays:
            setattr(parent, name, _Absent())
    if not is_last:
        model.set_output_embeddings(_Absent())
        model.all_tied_weights_keys = {}
    setattr(parent, list_name, blocks[start:end])
    for module in blocks[start:end].modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            module.layer_idx = index - start  # type: ignore[assignment]
    _cut_config(model.config, start, end)


def _is_before_blocks(model: Any, parent: nn.Module, name: str, list_name: str) -> bool:
    """Whether the model applies this module to its input or to its output, which no family declares.

    Modules are written down in the order of use, and only embeddings come first. Where both signs do not agree (OPT,
    Bloom) the family is refused.
    """
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


def block_of_tensors(files: ModelFiles) -> dict[str, int | None]:
    """For each tensor of the checkpoint the block it belongs to, None for embedding, norm and head."""
    with torch.device("meta"):
        model = _model_class(files)(copy.deepcopy(files.config))
    pattern = _block_pattern(model)
    return {name: int(match[2]) if (match := pattern.match(name)) else None for name in files.shards}


def _block_pattern(model: Any) -> re.Pattern[str]:
    """Matches the names of tensors in blocks: what comes before the index, the index, what comes after."""
    prefix, path = re.escape(model.base_model_prefix), re.escape(_block_list(model)[0])
    return re.compile(rf"^((?:{prefix}\.)?{path}\.)(\d+)(\..+)$")


def _needed_tensors(files: ModelFiles, model_class: Any, start: int, end: int) -> dict[str, str]:
    """The span's tensors: name in the cut model -> name in the checkpoint."""
    with torch.device("meta"):
        model = model_class(copy.deepcopy(files.config))
    pattern, prefix = _block_pattern(model), f"{model.base_model_prefix}."
    before = {name.removeprefix(prefix) for name in model.state_dict()}
    _cut(model, start, end)
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


def _materialise(files: ModelFiles, cut_class: Any, tensors: dict[str, Any], dtype: torch.dtype) -> Any:
    with _quiet_transformers():
        try:
            model, info = cut_class.from_pretrained(
                None, config=copy.deepcopy(files.config), state_dict=tensors, dtype=dtype, output_loading_info=True
            )
        except (RuntimeError, ValueError, SafetensorError) as error:
            raise IntegrityError(f"the weights in {files.directory} do not fit its config: {error}") from error
    wrong = sorted(info["missing_keys"] | {key for key, *_ in info["mismatched_keys"]})
    if wrong or info["error_msgs"]:
        raise IntegrityError(
            f"{files.directory} lacks usable tensors for {', '.join(wrong[:4])}{' and more' * (len(wrong) > 4)}",
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
