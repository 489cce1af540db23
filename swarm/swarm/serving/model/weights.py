"""Read the weights of one span: build the model without memory, cut it, and fill the rest from the shards.

transformers' own loader reads, so that old checkpoint layouts are converted. Tensors outside the span are never read. A
quantized span is read block by block, and each block is quantized before the next one is read: at most one block, the
embedding and the head are in memory at full size. Blocking.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor, nn

from swarm.building import BUILDING
from swarm.serving.model.cut import block_list, block_pattern, causal_lm_class, cut, quiet_transformers
from swarm.serving.model.formats.format import FLOATS, QuantizedTensor, quantized_tensor
from swarm.serving.model.model_files import ModelFiles
from swarm.serving.model.quantization import Bits, Int8Linear, is_quantizable, quantize
from swarm.serving.model.safetensors_reader import StoredTensor, stored_tensors

_PLAIN = (*FLOATS, torch.float64)
"""The dtypes of a weight that is not quantized."""


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
        tensors = _open_tensors(files, needed, dtype)
        shared = {name: tensor for name, tensor in (held or {}).items() if name in tensors}
        model = _materialise(files, cut_class, tensors | shared, start, dtype)
    _check_finite(files, model, needed, start)
    return model


def empty_model(files: ModelFiles, start: int, end: int) -> Any:
    """Build the same model without memory. Raises ConfigError for a family that cannot be cut."""
    with BUILDING, torch.device("meta"):
        model = causal_lm_class(files.config)(copy.deepcopy(files.config))
        cut(model, start, end)
    return model


def needed_shards(files: ModelFiles, start: int, end: int) -> list[Path]:
    """The files that hold tensors of blocks `[start, end)`. Raises ConfigError for a family that cannot be cut."""
    with BUILDING:
        needed = _needed_tensors(files, causal_lm_class(files.config), start, end)
    return _shards_of(files, needed)


def block_of_tensors(files: ModelFiles) -> dict[str, int | None]:
    """Return the block of each weight of the checkpoint, None for embedding, norm and head."""
    with BUILDING, torch.device("meta"):
        model = causal_lm_class(files.config)(copy.deepcopy(files.config))
    pattern = block_pattern(model)
    return {name: int(match[2]) if (match := pattern.match(name)) else None for name in files.parts}


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
    in_blocks = {name: name.removeprefix(prefix) for name in files.parts if pattern.match(name)}
    return {name: rows[within] for name, within in in_blocks.items() if within in rows}


def _needed_tensors(files: ModelFiles, model_class: Any, start: int, end: int) -> dict[str, str]:
    """The span's weights: name in the cut model -> name in the checkpoint, a key of `files.parts`."""
    with torch.device("meta"):  # BUILDING is held by the caller
        model = model_class(copy.deepcopy(files.config))
    pattern, prefix = block_pattern(model), f"{model.base_model_prefix}."
    before = {name.removeprefix(prefix) for name in model.state_dict()}
    cut(model, start, end)
    absent = before - {name.removeprefix(prefix) for name in model.state_dict()}
    needed = {}
    for name in files.parts:
        if match := pattern.match(name):
            if start <= int(match[2]) < end:
                needed[f"{match[1]}{int(match[2]) - start}{match[3]}"] = name
        elif name.removeprefix(prefix) not in absent:
            needed[name] = name
    return needed


def _shards_of(files: ModelFiles, needed: Mapping[str, str]) -> list[Path]:
    return sorted({files.shards[part] for name in needed.values() for part in files.parts[name].values()})


def _open_tensors(
    files: ModelFiles, needed: dict[str, str], dtype: torch.dtype
) -> dict[str, StoredTensor | QuantizedTensor | Tensor]:
    """Return tensors by name in the cut model. A tensor's bytes are read when its parameter is filled."""
    stored: dict[Path, dict[str, StoredTensor]] = {}
    for shard in _shards_of(files, needed):
        if not shard.is_file():
            raise ConfigError(f"{shard} is not there", remedy="download the blocks that are to be served")
        stored[shard] = stored_tensors(shard)
    return {new: _open_tensor(files, stored, name, dtype) for new, name in needed.items()}


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
            f"the weight {name} holds {parts[''].dtype}, and there is no scale or config that says what it stands for",
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


def _plain_config(files: ModelFiles) -> Any:
    """A copy without `quantization_config`: what transformers is given is dequantized already."""
    config = copy.deepcopy(files.config)
    if files.format is not None:
        del config.quantization_config
    return config


def check_whole(files: ModelFiles, model: Any) -> None:
    """Raises ConfigError for a family that keeps something which no checkpoint has."""
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
        match = pattern.match(name)
        whole = f"{match[1]}{int(match[2]) + start}{match[3]}" if match else name
        stored = files.parts.get(needed.get(name, whole), {}).values()
        shard = files.shards[next(iter(stored))] if stored else None
        raise IntegrityError(
            f"{shard.name if shard else files.directory}: {whole} has numbers that are not finite in {parameter.dtype}",
            remedy="download it again, or serve in float32 or bfloat16 if they are too large for float16",
        )


def read_quantized(
    files: ModelFiles, start: int, end: int, dtype: torch.dtype, device: torch.device | str, bits: Bits
) -> Any:
    """A transformers model of blocks `[start, end)` on `device`, frozen. Raises as `read_model` and `quantize`."""
    model = empty_model(files, start, end)
    for block in range(start, end):
        part = read_model(files, block, block + 1, dtype, held=_ends(model)).to(device).eval().requires_grad_(False)
        quantize(part, block_list(part)[2], bits)
        _put(part, model, block - start)
    check_whole(files, model)
    return model.eval()


def _ends(model: Any) -> dict[str, torch.Tensor]:
    """Tensors that were read with an earlier block, outside of the blocks: tied ones are the last block's, too."""
    pattern = block_pattern(model)
    return {name: t for name, t in model.state_dict().items() if not t.is_meta and not pattern.match(name)}


def _put(part: Any, model: Any, index: int) -> None:
    """Move the values of `part`, a model of one block, into `model`: the block's to the block at `index`."""
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
