"""Parts with the right shapes and meaningless values."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.quantized_models import KINDS
from swarm.serving.model.formats.bitsandbytes import bitsandbytes
from swarm.serving.model.formats.packed_ints import gptq

STATE = ".quant_state.bitsandbytes__fp4"


@pytest.mark.parametrize("group", [-1, 2, 2**31 - 1])
def test_gptq_is_refused_when_an_input_names_a_missing_group(group: int) -> None:
    kind = KINDS["gptq"]
    stored = kind.quantize(torch.randn(16, 32)).parts
    stored["g_idx"][5] = group
    with pytest.raises(ValueError, match="is not below 2"):
        gptq(kind.config).weight({f".{name}": part for name, part in stored.items()}, (16, 32), torch.float32)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (b"\xff", "decode"),
        (b"[" * 4000, "nested too deep|Expecting"),
        (b"[]", "no matrix"),
        ({"shape": [16]}, "no matrix"),
        ({"shape": [16, -32]}, "shape is -32"),
        ({"blocksize": 0}, "blocksize is 0"),
        ({"blocksize": 2**40}, "blocksize is"),
        ({"blocksize": None}, "blocksize is None"),
        ({"nested_blocksize": 0, "nested_offset": 0.0}, "nested_blocksize is 0"),
        ({"nested_blocksize": 256, "nested_offset": float("nan")}, "nested_offset is nan"),
        ({"nested_blocksize": 256}, "nested_offset is None"),
    ],
)
def test_bitsandbytes_is_refused_when_its_state_is_malformed(state: bytes | dict[str, Any], message: str) -> None:
    kind = KINDS["bnb-fp4"]
    stored = kind.quantize(torch.randn(16, 32)).parts
    parts = {name.removeprefix("weight"): part for name, part in stored.items()}
    if isinstance(state, dict):
        state = json.dumps(json.loads(bytes(parts[STATE].tolist())) | state).encode()
    parts[STATE] = torch.tensor(list(state), dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        bitsandbytes(kind.config).weight(parts, (16, 32), torch.float32)


def test_bitsandbytes_rows_laid_out_for_a_gpu_are_refused() -> None:
    kind = KINDS["bnb-int8"]
    stored = kind.quantize(torch.randn(16, 32)).parts
    parts = {"": stored["weight"], ".SCB": stored["SCB"], ".weight_format": torch.tensor(1, dtype=torch.uint8)}
    with pytest.raises(ValueError, match="laid out for one kind of GPU"):
        bitsandbytes(kind.config).weight(parts, (16, 32), torch.float32)
