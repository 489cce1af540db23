"""FP8 compared with transformers' own dequantization, where blocks divide the weight evenly."""

from __future__ import annotations

import pytest
import torch
from swarm.serving.model.formats.block_floats import Fp8
from transformers.integrations.finegrained_fp8 import Fp8Dequantize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrix", "experts"])
def test_dequantized_fp8_weight_equals_that_of_transformers(
    lead: tuple[int, ...], kind: torch.dtype, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(*lead, 256, 384, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(*lead, 2, 3, generator=generator).to(kind)
    parts = {"": codes, "_scale_inv": scales}
    found = Fp8(block=(128, 128)).weight(parts, tuple(codes.shape), dtype)
    (expected,) = Fp8Dequantize(None).convert({"w": [codes], "w_scale_inv": [scales.float()]})["w"]
    assert found.dtype == dtype
    assert torch.equal(found, expected.to(dtype))
