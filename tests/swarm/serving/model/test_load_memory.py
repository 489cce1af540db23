"""What loading a span leaves in memory, seen from the system: in a process of its own, for a heap remembers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SPARE_BYTES = 16e6
"""What a few tensors on their way and a fragmented heap take; the files of these models have 68 MB."""

LOAD = """
import sys
from pathlib import Path
from swarm.serving.model.files import open_model
from swarm.serving.model.loading import load, weigh
from swarm.serving.server_options import ServerOptions

def status(name):
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])

directory, num_blocks, options = Path(sys.argv[1]), int(sys.argv[3]), ServerOptions(dtype=sys.argv[2], kv_bytes=2**20)
load(directory, 0, 1, options)  # the libraries' own share
held, resident = status("RssAnon"), status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
span = load(directory, 0, num_blocks, options).span
needs = weigh(open_model(directory), options)
weights = num_blocks * needs.block_bytes + needs.ends_bytes
print(status("RssAnon") - held, status("VmHWM") - resident, weights, needs.loading_bytes)
"""


def _load(directory: Path, dtype: str, num_blocks: int = 8) -> tuple[int, int, int, int]:
    """Bytes held after, most bytes resident meanwhile, bytes that the weights take, and more of them while loading."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=num_blocks, num_attention_heads=4
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    weights = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in model.state_dict().items()}
    model.save_pretrained(directory, state_dict=weights)
    command = [sys.executable, "-c", LOAD, directory, dtype, str(num_blocks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    held, peak, needed, loading = map(int, done.stdout.split())
    return held, peak, needed, loading


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_load_of_8_bit_weights_leaves_little_more_in_memory_than_they_take(tmp_path: Path) -> None:
    held, _, needed, _ = _load(tmp_path, "int8")
    assert needed > 30e6
    assert held < 1.5 * needed + SPARE_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_load_of_few_bits_takes_at_no_time_the_bytes_of_the_files(tmp_path: Path, dtype: str) -> None:
    """What is counted for loading, one block of 24, is enough: the files have 202 MB, and are never in memory whole."""
    _, peak, needed, loading = _load(tmp_path, dtype, 24)
    assert 0 < loading < 15e6
    assert peak < needed + loading + 3 * SPARE_BYTES < 190e6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_load_takes_at_no_time_much_more_than_the_weights(tmp_path: Path) -> None:
    """The files' own bytes, half as many as these weights take, are not in memory beside them."""
    _, peak, needed, _ = _load(tmp_path, "float32")
    assert needed > 120e6
    assert peak < needed + 3 * SPARE_BYTES
