"""Tests of what loading a span leaves in memory, as the system reports it.

Each load has its own process, since a heap keeps what it once allocated.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.forked_node import forking
from support.quantized_models import write_checkpoint
from swarm.serving.engine import span_speed
from swarm.serving.model import fused_decode
from swarm.serving.model.family_check import check_directory
from swarm.serving.model.model_files import open_model
from swarm.serving.server.capability import weigh
from swarm.serving.server.deployment import ServerOptions, load
from transformers import LlamaConfig, LlamaForCausalLM

SPARE_BYTES = 16e6
"""What a few tensors on their way and a fragmented heap take; the files of the smaller model have 68 MB."""

FIGURES = "figures"

FILE_BYTES = 101e6
"""The bytes of the larger model."""

CASES = [["int8", "12"], ["int4", "12"], ["float32", "8"], ["bfloat16", "8-fp8"]]
"""Type of the weights; number of blocks, and what they are stored in if it is not bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Bytes held afterwards, most bytes resident while loading, bytes of the weights, and their most bytes while
    loading.
    """

    held: int
    peak: int
    needed: int
    loading: int


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Loaded]:
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    models = tmp_path_factory.mktemp("models")
    for name in {name for _, name in CASES}:
        _save_model(models / name, int(name.partition("-")[0]), is_fp8=name.endswith("fp8"))
    loading = forking().Process(target=load_each, args=(models, CASES))
    loading.start()
    loading.join(280)
    assert loading.exitcode == 0
    figures = [Loaded(**json.loads(line)) for line in (models / FIGURES).read_text().splitlines()]
    assert len(figures) == len(CASES)
    return {(dtype, name): one for (dtype, name), one in zip(CASES, figures, strict=True)}


def load_each(models: Path, cases: list[list[str]]) -> None:
    """Load each model in a fork of this process, which has imported everything, has compiled the kernels and tried the
    families of all models, and has loaded nothing."""
    importlib.import_module("torchao.prototype.quantization.int4")
    fused_decode.kernels()
    for _, name in cases:
        check_directory(models / name)
    for dtype, name in cases:
        pid = os.fork()
        if not pid:
            _measure(models, dtype, name)
            os._exit(0)
        os.waitpid(pid, 0)


def _measure(models: Path, dtype: str, name: str) -> None:
    directory, options = models / name, ServerOptions(dtype=dtype, kv_bytes=2**20)
    span_speed.NUM_STEPS = 1  # memory is measured here, and no time
    num_blocks = int(name.partition("-")[0])
    load(directory, 0, 1, options)  # the libraries' own share
    held, resident = _status("RssAnon"), _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    span = load(directory, 0, num_blocks, options).span
    needs = weigh(open_model(directory), options)
    figures = {
        "held": _status("RssAnon") - held,
        "peak": _status("VmHWM") - resident,
        "needed": num_blocks * needs.block_bytes + needs.ends_bytes,
        "loading": needs.loading_bytes,
    }
    assert span.num_blocks == num_blocks, "it is held until here"
    with (models / FIGURES).open("a") as file:
        file.write(json.dumps(figures) + "\n")


def _status(name: str) -> int:
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])


def _save_model(directory: Path, num_blocks: int, *, is_fp8: bool) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=num_blocks, num_attention_heads=4
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    weights = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in model.state_dict().items()}
    if is_fp8:
        for name in [name for name in weights if "_proj." in name]:
            weights[name] = weights[name].to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = torch.ones([size // 128 for size in weights[name].shape])
        config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_checkpoint(directory, config.to_dict(), weights)


def test_load_of_8_bit_weights_leaves_little_more_in_memory_than_they_take(
    loaded: dict[tuple[str, str], Loaded],
) -> None:
    one = loaded["int8", "12"]
    assert one.needed > 30e6
    assert one.held < 1.5 * one.needed + SPARE_BYTES


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_load_of_few_bits_never_takes_as_much_as_the_files(loaded: dict[tuple[str, str], Loaded], dtype: str) -> None:
    """Loading counts one block of 12.

    Resident memory also has what the heap and the system have not taken back yet: that of several blocks on a busy
    machine, and never that of all.
    """
    one = loaded[dtype, "12"]
    assert 0 < one.loading < 15e6
    assert one.peak < one.needed + FILE_BYTES / 2


def test_load_never_takes_much_more_than_the_weights(loaded: dict[tuple[str, str], Loaded]) -> None:
    """The files' own bytes, half as many as these weights take, are not in memory beside them."""
    one = loaded["float32", "8"]
    assert one.needed > 120e6
    assert one.peak < one.needed + 3 * SPARE_BYTES


def test_load_of_fp8_never_takes_much_more_than_the_dequantized_weights(loaded: dict[tuple[str, str], Loaded]) -> None:
    """Each weight is read and dequantized alone, so memory holds neither all codes nor all floats twice."""
    one = loaded["bfloat16", "8-fp8"]
    assert one.needed > 60e6
    assert one.peak < one.needed + 2 * SPARE_BYTES
