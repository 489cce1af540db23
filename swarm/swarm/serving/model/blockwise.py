"""Reads a span block by block, each made smaller before the next one is read.

So that no more of it is in memory as the checkpoint has it than one block, with the embedding and head, which stay as
they are. Leaves reading to `weights`, and making smaller to `quantization`. Blocking.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swarm.serving.model.cut import block_list, block_pattern
from swarm.serving.model.int8_rows import Int8Linear
from swarm.serving.model.model_files import ModelFiles
from swarm.serving.model.quantization import Bits, quantize
from swarm.serving.model.weights import check_whole, empty_model, read_model


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
