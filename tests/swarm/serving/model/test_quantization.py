"""Weights of 8 and 4 bits: how far their outputs deviate, and how many bytes they take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import FAMILIES
from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.model_files import open_model
from swarm.serving.model.quantization import Bits, Int8Linear
from swarm.serving.model.span import Span
from swarm.serving.model.span_loading import load_span
from swarm.serving.server.capability import VolunteerOptions, measure_capability, weigh
from swarm.serving.server.deployment import ServerOptions, load
from swarm_protocol.errors import ConfigError
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def weight_bytes(span: Span) -> int:
    """Return a tensor's bytes; for a quantized tensor, those of its parts, as if packed parts were not packed."""
    total = sum(buffer.nbytes for buffer in span._model.buffers() if buffer.dtype == torch.int8)
    for parameter in span._model.parameters():
        parts = [parameter.to_dense() if parameter.is_mkldnn else parameter]
        if hasattr(parameter, "__tensor_flatten__"):
            parts = [getattr(parameter, name) for name in parameter.__tensor_flatten__()[0]]
        total += sum(part.untyped_storage().nbytes() for part in parts)
    return total


def outputs(span: Span, x: torch.Tensor) -> torch.Tensor:
    piece = SequenceRows(num_tokens=len(x), position=0, pages=[0, 1], want=Want.ALL)
    (output,) = span.run(Batch(x=x, pieces=(piece,), start=span.start, end=span.end), span.new_pool(2))
    assert output is not None
    return output.float()


@pytest.mark.parametrize(("bits", "share", "error"), [("int8", 0.58, 0.05), ("int4", 0.37, 0.45)])
def test_load_with_few_bits_takes_less_and_stays_close(llama_dir: Path, bits: Bits, share: float, error: float) -> None:
    files = open_model(llama_dir)
    exact, half = load_span(files, 2, 4), load_span(files, 2, 4, dtype=torch.bfloat16)
    small = load_span(files, 2, 4, dtype=torch.bfloat16, bits=bits)
    assert weight_bytes(small) <= share * weight_bytes(half)
    assert small.dtype == torch.bfloat16
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    expected = outputs(exact, x)
    assert (outputs(small, x) - expected).norm() <= error * expected.norm()


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_load_with_few_bits_takes_layers_of_any_size(write_config: Any, tmp_path: Path, bits: Bits) -> None:
    """A layer of 8 outputs has no 4-bit product."""
    config = FAMILIES["llama"]()
    config.num_key_value_heads = 1
    files = open_model(write_config(tmp_path / "model", config))
    exact, small = load_span(files, 2, 3), load_span(files, 2, 3, dtype=torch.bfloat16, bits=bits)
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    expected = outputs(exact, x)
    assert (outputs(small, x) - expected).norm() <= {"int8": 0.05, "int4": 0.45}[bits] * expected.norm()
    needs = weigh(files, ServerOptions(dtype=bits))
    assert weight_bytes(small) <= needs.weight_bytes(1) - needs.ends_bytes


def test_load_builds_as_often_for_many_blocks_as_for_few(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = 0
    init = LlamaDecoderLayer.__init__

    def count(self: LlamaDecoderLayer, config: Any, layer_idx: int) -> None:
        nonlocal built
        built += 1
        init(self, config, layer_idx)

    monkeypatch.setattr(LlamaDecoderLayer, "__init__", count)
    numbers = []
    for end in (1, 6):
        built = 0
        load_span(open_model(llama_dir), 0, end, bits="int8")
        numbers.append(built)
    assert numbers[0] == numbers[1] > 0


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_weigh_counts_no_fewer_bytes_than_quantized_blocks_take(llama_dir: Path, bits: Bits) -> None:
    files = open_model(llama_dir)
    weights = weigh(files, ServerOptions(dtype=bits))
    block_bytes = weight_bytes(load_span(files, 2, 4, dtype=torch.bfloat16, bits=bits)) // 2
    assert block_bytes <= weights.block_bytes <= 1.1 * block_bytes
    assert weights.ends_bytes == 2 * (2 * 256 * 32 + 32)


def test_load_measures_a_quantized_span(llama_dir: Path) -> None:
    loaded = load(llama_dir, 0, 2, ServerOptions(dtype="int8", kv_bytes=10**6))
    assert loaded.speed.kv_bytes_per_token == loaded.span.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_load_family_without_linear_layers_is_refused(model_dirs: Callable[[str], Path], family: str) -> None:
    with pytest.raises(ConfigError, match="most of its weights outside of linear layers"):
        load_span(open_model(model_dirs(family)), 2, 4, dtype=torch.bfloat16, bits="int8")


def test_load_without_the_library_says_what_to_install(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ConfigError, match="int4 weights need torchao"):
        load_span(open_model(llama_dir), 2, 4, dtype=torch.bfloat16, bits="int4")


def test_load_on_a_device_without_kernels_is_refused_with_a_clear_message(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_arguments: Any, **_options: Any) -> None:
        raise RuntimeError("no kernel for\nthis device")

    monkeypatch.setattr("torchao.quantization.quantize_", without)
    with pytest.raises(ConfigError, match="int4 weights do not work on this device: no kernel for this device"):
        load_span(open_model(llama_dir), 2, 4, dtype=torch.bfloat16, bits="int4")


def test_load_of_tied_ends_shares_them(model_dirs: Callable[[str], Path]) -> None:
    """The weight is read with the first block, and the last block uses it too."""
    files = open_model(model_dirs("llama-tied"))
    span = load_span(files, 0, files.num_blocks, dtype=torch.bfloat16, bits="int8")
    assert span._model.get_input_embeddings().weight is span._model.get_output_embeddings().weight
    alone = load_span(files, files.num_blocks - 1, files.num_blocks, dtype=torch.bfloat16, bits="int8")
    assert torch.equal(alone._model.get_output_embeddings().weight, span._model.get_output_embeddings().weight)


def test_capability_with_few_bits_counts_what_loading_takes(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServerOptions(dtype="int8", kv_bytes=1)
    weights = weigh(open_model(llama_dir), options)
    two = 2 * weights.block_bytes + weights.ends_bytes + weights.loading_bytes
    assert weights.loading_bytes > weights.block_bytes
    able = measure_capability(llama_dir, "me", VolunteerOptions(max_bytes=two, server=options))
    assert able.capacity.num_blocks == 2
    monkeypatch.setattr("swarm.serving.server.capability.measure_block", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ConfigError, match="more while they are loaded"):
        measure_capability(llama_dir, "me", VolunteerOptions(max_bytes=two - weights.block_bytes - 1, server=options))


NUM_IN, NUM_OUT = 64, 3000


def layers(*, bias: bool = False) -> tuple[nn.Linear, Int8Linear]:
    torch.manual_seed(0)
    linear = nn.Linear(NUM_IN, NUM_OUT, bias=bias).to(torch.bfloat16).requires_grad_(False)
    linear.weight[7] = 0
    return linear, Int8Linear(linear)


class Largest(TorchDispatchMode):
    """Records the most values in any floating-point tensor that an operation returned."""

    num_values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.num_values = max(self.num_values, out.numel())
        return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 100])
def test_quantized_product_is_near_that_of_the_weights(num_rows: int, bias: bool) -> None:
    linear, int8 = layers(bias=bias)
    x = torch.randn(2, num_rows, NUM_IN).to(torch.bfloat16)
    expected = linear(x).float()
    found = int8(x)
    assert found.shape == expected.shape
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("num_rows", [1, 100])
def test_quantized_product_never_dequantizes_a_whole_weight(num_rows: int) -> None:
    _, int8 = layers()
    x = torch.randn(num_rows, NUM_IN).to(torch.bfloat16)
    with Largest() as largest, torch.inference_mode():
        int8(x)
    assert 0 < largest.num_values <= max(1024 * NUM_IN, num_rows * NUM_OUT)
    assert 1024 * NUM_IN < NUM_OUT * NUM_IN / 2


def test_quantized_input_gradient_is_near_that_through_the_weights() -> None:
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
