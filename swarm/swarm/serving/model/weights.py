"""Reads one span's weights: builds the model without memory, cuts it, and fills what is left from the shards.

transformers' own loader reads, so that old checkpoint layouts are converted. What `cut` cut off is never read.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor
from transformers.utils import logging as transformers_logging

from swarm.building import BUILDING
from swarm.serving.model.cut import block_pattern, causal_lm_class, cut
from swarm.serving.model.files import ModelFiles
from swarm.serving.model.quantization import is_quantizable
from swarm.serving.model.stored import StoredTensor, stored_tensors


def read_model(
    files: ModelFiles, start: int, end: int, dtype: torch.dtype, *, held: Mapping[str, Tensor] | None = None
) -> Any:
    """A transformers model of blocks `[start, end)`, with the embedding for block 0 and the head for the last block.

    Tensors that are `held` already, by their name in the model, are shared with it and not read again.

    Raises ConfigError for a family that cannot be cut, IntegrityError for a missing, misshapen or unreadable tensor or
    one with numbers that are not finite, naming it and its file.
    """
    model_class = causal_lm_class(files.config)

    def build_and_cut(self: Any, config: Any) -> None:
        model_class.__init__(self, config)
        cut(self, start, end)

    # A subclass of the same name: transformers looks up a family's checkpoint conversions by class name.
    cut_class = type(
        model_class.__name__, (model_class,), {"__init__": build_and_cut, "__module__": model_class.__module__}
    )
    with BUILDING:
        needed = _needed_tensors(files, model_class, start, end)
        tensors = _open_tensors(files, needed)
        shared = {name: tensor for name, tensor in (held or {}).items() if name in tensors}
        model = _materialise(files, cut_class, tensors | shared, start, dtype)
    _check_finite(files, model, needed, start)
    return model


def empty_model(files: ModelFiles, start: int, end: int) -> Any:
    """The same without memory. Raises ConfigError for a family that cannot be cut."""
    with BUILDING, torch.device("meta"):
        model = causal_lm_class(files.config)(copy.deepcopy(files.config))
        cut(model, start, end)
    return model


def needed_shards(files: ModelFiles, start: int, end: int) -> list[Path]:
    """The files that hold tensors of blocks `[start, end)`. Raises ConfigError for a family that cannot be cut."""
    with BUILDING:
        needed = _needed_tensors(files, causal_lm_class(files.config), start, end)
    return sorted({files.shards[name] for name in needed.values()})


def block_of_tensors(files: ModelFiles) -> dict[str, int | None]:
    """For each tensor of the checkpoint the block it belongs to, None for embedding, norm and head."""
    with BUILDING, torch.device("meta"):
        model = causal_lm_class(files.config)(copy.deepcopy(files.config))
    pattern = block_pattern(model)
    return {name: int(match[2]) if (match := pattern.match(name)) else None for name in files.shards}


def linear_tensors(files: ModelFiles) -> dict[str, int]:
    """The tensors of blocks that `quantization` makes smaller, and their number of rows."""
    with BUILDING, torch.device("meta"):
        model = causal_lm_class(files.config)(copy.deepcopy(files.config))
    prefix, pattern = f"{model.base_model_prefix}.", block_pattern(model)
    rows = {
        f"{name}.weight": module.out_features
        for name, module in model.base_model.named_modules()
        if is_quantizable(module)
    }
    in_blocks = {name: name.removeprefix(prefix) for name in files.shards if pattern.match(name)}
    return {name: rows[within] for name, within in in_blocks.items() if within in rows}


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


def _open_tensors(files: ModelFiles, needed: dict[str, str]) -> dict[str, StoredTensor | Tensor]:
    """By name in the cut model. A tensor's bytes are read when its parameter is filled."""
    stored: dict[Path, dict[str, StoredTensor]] = {}
    for shard in sorted({files.shards[name] for name in needed.values()}):
        if not shard.is_file():
            raise ConfigError(f"{shard} is not there", remedy="download the blocks that are to be served")
        stored[shard] = stored_tensors(shard)
    for name in needed.values():
        if name not in stored[files.shards[name]]:
            raise IntegrityError(f"{files.shards[name]} lacks the tensor {name}", remedy="download it again")
    return {new: stored[files.shards[old]][old] for new, old in needed.items()}


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
        except (RuntimeError, ValueError) as error:
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
    check_whole(files, model)
    return model


def check_whole(files: ModelFiles, model: Any) -> None:
    """Raises ConfigError for a family that keeps something which no checkpoint has."""
    stranded = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if stranded:
        raise ConfigError(
            f"{files.config.model_type} leaves {stranded[0]} without a value", remedy="serve another family"
        )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the library's own progress bars and load reports: failures are raised, and named, here.

    Nor what torchao, which it imports, logs of kernels for other machines.
    """
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


def _check_finite(files: ModelFiles, model: Any, needed: dict[str, str], start: int) -> None:
    pattern = block_pattern(model)
    for name, parameter in model.named_parameters():
        if parameter.isfinite().all():
            continue
        match = pattern.match(name)
        whole = f"{match[1]}{int(match[2]) + start}{match[3]}" if match else name
        shard = files.shards.get(needed.get(name, whole))
        raise IntegrityError(
            f"{shard.name if shard else files.directory}: {whole} has numbers that are not finite in {parameter.dtype}",
            remedy="download it again, or serve in float32 or bfloat16 if they are too large for float16",
        )
