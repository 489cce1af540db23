"""Reads the weights of one span: builds the model without memory, cuts it to the span, and fills it from the shards.

The whole model is built on the meta device, where it takes no memory, and then cut (`model_cut`). This keeps what a
family derives from a block's absolute index (which blocks have experts, how attention is scaled).

transformers' own loader reads the tensors, so that old checkpoint layouts are converted. Tensors outside the span are
never read. A quantized span is read block by block, and each block is quantized before the next one is read: memory
holds at most one block, the embedding and the head at full size. Blocks.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor, nn

from swarm.serving.model.formats.format import FLOATS, QuantizedTensor, quantized_tensor
from swarm.serving.model.model_cut import block_list, block_pattern, cut, modules_beyond
from swarm.serving.model.model_files import ModelFiles, causal_lm_class
from swarm.serving.model.quantization import Bits, Int8Linear, is_quantizable, quantize
from swarm.serving.model.safetensors_reader import StoredTensor, stored_tensors
from swarm.threads import BUILDING

_PLAIN = (*FLOATS, torch.float64)
"""The dtypes of a weight that is not quantized."""


def read_model(
    files: ModelFiles,
    start: int,
    end: int,
    dtype: torch.dtype,
    *,
    held: Mapping[str, Tensor] | None = None,
    skeleton: _Skeleton | None = None,
) -> Any:
    """Return a transformers model of blocks `[start, end)`, with the embedding for block 0 and the head for the last
    block.

    Tensors in `held`, by their names in the model, are shared with the model and not read again. The model is copied
    from `skeleton`, or built if that is None.

    Raises ConfigError for a family that cannot be cut. Raises IntegrityError, which names tensor and file, for a tensor
    that is missing, unreadable, of a wrong shape, or not finite.
    """
    model_class = causal_lm_class(files.config)
    needed: dict[str, str] = {}
    tensors: dict[str, StoredTensor | QuantizedTensor | Tensor] = {}

    def build_and_cut(self: Any, config: Any) -> None:
        if skeleton is None:
            model_class.__init__(self, config)
        else:
            skeleton.copy_into(self, config, start, end)
        needed.update(_needed_tensors(self, files.parts, start, end))
        cut(self, start, end)
        # transformers reads the tensors after the model is built
        tensors.update(_open_tensors(files, needed, dtype, held or {}))

    # a subclass with the same name: transformers looks up a family's checkpoint conversions by class name
    cut_class = type(
        model_class.__name__, (model_class,), {"__init__": build_and_cut, "__module__": model_class.__module__}
    )
    with BUILDING:
        model = _materialise(files, cut_class, tensors, start, dtype)
    _check_finite(files, model, needed, start)
    return model


class _Skeleton:
    """The whole model on the meta device, from which models of single blocks are copied. It is built once, since that
    takes longer the more blocks the model has."""

    def __init__(self) -> None:
        self._whole: Any = None

    def copy_into(self, model: Any, config: Any, start: int, end: int) -> None:
        """Initialize `model` in place of its `__init__`. Blocks outside of `[start, end)` are shared with the skeleton.

        Call it only while transformers loads, which sets dtype and device of what is built.
        """
        if self._whole is None:
            self._whole = causal_lm_class(config)(config)
        blocks = block_list(self._whole)[2]
        shared = {id(block): block for block in (*blocks[:start], *blocks[end:])}
        vars(model).update(copy.deepcopy(vars(self._whole), {id(self._whole): model, **shared}))


def needed_shards(files: ModelFiles, start: int, end: int) -> list[Path]:
    """Return the files that hold tensors of blocks `[start, end)`. Raises ConfigError for a family that cannot be
    cut."""
    return _shards_of(files, _needed_tensors(files.whole_model, files.parts, start, end))


def needed_tensors(files: ModelFiles, spans: Iterable[tuple[int, int]]) -> list[frozenset[str]]:
    """Return for each of the `spans` the checkpoint's weights that a server of these blocks reads."""
    model = files.whole_model
    return [frozenset(_needed_tensors(model, files.parts, start, end).values()) for start, end in spans]


def block_of_tensors(files: ModelFiles) -> dict[str, int | None]:
    """Return the block of each weight of the checkpoint; None for embedding, norm and head."""
    pattern = block_pattern(files.whole_model)
    return {name: int(match[2]) if (match := pattern.match(name)) else None for name in files.parts}


def linear_tensors(files: ModelFiles, bits: Bits) -> dict[str, int]:
    """Return the blocks' tensors that `quantization` replaces, with their number of rows."""
    model = files.whole_model
    prefix, pattern = f"{model.base_model_prefix}.", block_pattern(model)
    rows = {
        f"{name}.weight": module.out_features
        for name, module in model.base_model.named_modules()
        if is_quantizable(module, bits)
    }
    in_blocks = {name: name.removeprefix(prefix) for name in files.parts if pattern.match(name)}
    return {name: rows[within] for name, within in in_blocks.items() if within in rows}


def _needed_tensors(model: Any, names: Iterable[str], start: int, end: int) -> dict[str, str]:
    """Return the weights among `names` that the model has after the cut: name in the cut model -> name in the
    checkpoint."""
    pattern, prefix = block_pattern(model), f"{model.base_model_prefix}."
    gone = {id(module) for _, _, module in modules_beyond(model, start, end)}
    absent = {
        f"{path}.{name}".removeprefix(prefix)
        for path, module in model.named_modules(remove_duplicate=False)
        if id(module) in gone
        for name in module.state_dict()
    }
    needed = {}
    for name in names:
        if match := pattern.match(name):
            if start <= int(match[2]) < end:
                needed[f"{match[1]}{int(match[2]) - start}{match[3]}"] = name
        elif name.removeprefix(prefix) not in absent:
            needed[name] = name
    return needed


def _shards_of(files: ModelFiles, needed: Mapping[str, str]) -> list[Path]:
    return sorted({files.shards[part] for name in needed.values() for part in files.parts[name].values()})


def _open_tensors(
    files: ModelFiles, needed: Mapping[str, str], dtype: torch.dtype, held: Mapping[str, Tensor]
) -> dict[str, StoredTensor | QuantizedTensor | Tensor]:
    """Return the tensors by name in the cut model, with those in `held`. The others are read when their parameter is
    filled."""
    stored: dict[Path, dict[str, StoredTensor]] = {}
    for shard in _shards_of(files, needed):
        if not shard.is_file():
            raise ConfigError(f"{shard} is not there", remedy="download the blocks that are to be served")
        stored[shard] = stored_tensors(shard)
    tensors = {new: _open_tensor(files, stored, name, dtype) for new, name in needed.items()}
    return tensors | {name: tensor for name, tensor in held.items() if name in tensors}


def _open_tensor(
    files: ModelFiles, stored: Mapping[Path, Mapping[str, StoredTensor]], name: str, dtype: torch.dtype
) -> StoredTensor | QuantizedTensor:
    parts = {}
    for ending, part in files.parts[name].items():
        if part not in stored[files.shards[part]]:
            raise IntegrityError(f"{files.shards[part]} lacks the tensor {part}", remedy="download it again")
        parts[ending] = stored[files.shards[part]][part]
    if files.format is not None and parts.keys() != {""}:
        return quantized_tensor(name, parts, files.format, dtype)
    if name.endswith("weight") and parts[""].dtype not in _PLAIN:
        raise IntegrityError(
            f"the weight {name} holds {parts[''].dtype}, and no scale or config says how to dequantize it",
            remedy="serve the unquantized checkpoint",
        )
    return parts[""]


def _materialise(files: ModelFiles, cut_class: Any, tensors: dict[str, Any], start: int, dtype: torch.dtype) -> Any:
    with quiet_transformers():
        try:
            model, info = cut_class.from_pretrained(
                None,
                config=_plain_config(files),
                state_dict=tensors,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported instead, so that the error can name them
            )
        except (RuntimeError, ValueError) as error:
            raise IntegrityError(f"the weights in {files.directory} do not fit its config: {error}") from error
    pattern = block_pattern(model)
    lacking = sorted(info["missing_keys"] | {name for name, *_ in info["mismatched_keys"]})
    wrong = [_name_before_cut(pattern, name, start) for name in lacking]
    if wrong or info["error_msgs"]:
        raise IntegrityError(
            f"{files.directory} lacks tensors of the right shape for {', '.join(wrong[:4] or info['error_msgs'])}"
            f"{' and more' * (len(wrong) > 4)}",
            remedy="download the model again",
        )
    check_whole(files, model)
    return model


def _plain_config(files: ModelFiles) -> Any:
    """Return a copy of the config without `quantization_config`, since transformers gets dequantized tensors."""
    config = copy.deepcopy(files.config)
    if files.format is not None:
        del config.quantization_config
    return config


def check_whole(files: ModelFiles, model: Any) -> None:
    """Raises ConfigError for a family with a parameter or buffer that the checkpoint does not fill."""
    stranded = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if stranded:
        raise ConfigError(
            f"{files.config.model_type} leaves {stranded[0]} without a value", remedy="serve another family"
        )


def _check_finite(files: ModelFiles, model: Any, needed: dict[str, str], start: int) -> None:
    pattern = block_pattern(model)
    for name, parameter in model.named_parameters():
        if parameter.isfinite().all():
            continue
        whole = _name_before_cut(pattern, name, start)
        stored = files.parts.get(needed.get(name, whole), {}).values()
        shard = files.shards[next(iter(stored))] if stored else None
        raise IntegrityError(
            f"{shard.name if shard else files.directory}: {whole} has numbers that are not finite in {parameter.dtype}",
            remedy="download it again, or serve in float32 or bfloat16 if they are too large for float16",
        )


def _name_before_cut(pattern: re.Pattern[str], name: str, start: int) -> str:
    """Return the name in the whole model of a tensor of a model that begins with block `start`."""
    match = pattern.match(name)
    return f"{match[1]}{int(match[2]) + start}{match[3]}" if match else name


def read_quantized(
    files: ModelFiles, start: int, end: int, dtype: torch.dtype, device: torch.device | str, bits: Bits
) -> Any:
    """Return a frozen transformers model of blocks `[start, end)` on `device`. Raises as `read_model` and
    `quantize`."""
    model, skeleton = copy.deepcopy(files.whole_model), _Skeleton()
    cut(model, start, end)
    for block in range(start, end):
        part = read_model(files, block, block + 1, dtype, held=_ends(model), skeleton=skeleton)
        part = part.to(device).eval().requires_grad_(False)
        quantize(part, block_list(part)[2], bits)
        _put(part, model, block - start)
    check_whole(files, model)
    return model.eval()


def _ends(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors outside of the blocks that were read with an earlier block. Tied ones are also used by the
    last block."""
    pattern = block_pattern(model)
    return {name: t for name, t in model.state_dict().items() if not t.is_meta and not pattern.match(name)}


def _put(part: Any, model: Any, index: int) -> None:
    """Move the values of `part`, a model of one block, to `model`. The block becomes the one at `index`."""
    list_name = next(name for name, module in part.named_modules() if module is block_list(part)[2])
    for name, module in part.named_modules():
        if name.startswith(f"{list_name}.0"):
            name = f"{list_name}.{index}{name.removeprefix(f'{list_name}.0')}"  # noqa: PLW2901
        if isinstance(module, Int8Linear):
            model.set_submodule(name, module)
            continue
        into: nn.Module = model.get_submodule(name)
        into._parameters.update(module._parameters)
        into._buffers.update(module._buffers)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' progress bars and load reports, since failures are raised, and torchao's log of kernels
    for other machines."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415 (over half a second)

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
