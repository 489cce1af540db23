"""Linear layers of int8 rows: what they compute, and what they never make."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm.serving.model.int8_rows import Int8Linear
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span import load_span
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

NUM_IN, NUM_OUT = 64, 3000


def layers(*, bias: bool = False) -> tuple[nn.Linear, Int8Linear]:
    torch.manual_seed(0)
    linear = nn.Linear(NUM_IN, NUM_OUT, bias=bias).to(torch.bfloat16).requires_grad_(False)
    linear.weight[7] = 0
    return linear, Int8Linear(linear)


class Largest(TorchDispatchMode):
    """Remembers the most values of a floating-point tensor that any operation gave."""

    num_values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.num_values = max(self.num_values, out.numel())
        return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 100])
def test_product_is_near_that_of_the_weights(num_rows: int, bias: bool) -> None:
    linear, int8 = layers(bias=bias)
    x = torch.randn(2, num_rows, NUM_IN).to(torch.bfloat16)
    expected = linear(x).float()
    found = int8(x)
    assert found.shape == expected.shape
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("num_rows", [1, 100])
def test_no_step_makes_floats_of_a_whole_weight(num_rows: int) -> None:
    _, int8 = layers()
    x = torch.randn(num_rows, NUM_IN).to(torch.bfloat16)
    with Largest() as largest, torch.inference_mode():
        int8(x)
    assert 0 < largest.num_values <= max(1024 * NUM_IN, num_rows * NUM_OUT)
    assert 1024 * NUM_IN < NUM_OUT * NUM_IN / 2


def test_gradient_of_the_input_is_near_that_through_the_weights() -> None:
    linear, int8 = layers(bias=True)
    gradients = []
    for layer in (linear, int8):
        x = torch.ones(3, NUM_IN, dtype=torch.bfloat16, requires_grad=True)
        layer(x).square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.float())
    assert (gradients[0] - gradients[1]).norm() <= 0.02 * gradients[0].norm()


def test_span_of_int8_on_a_cpu_needs_no_library(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    span = load_span(open_model(llama_dir), 1, 3, dtype=torch.bfloat16, bits="int8")
    assert sum(isinstance(module, Int8Linear) for module in span._model.modules()) == 2 * 7
    assert span.dtype == torch.bfloat16
