from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from swarm.serving.loading import load, measure_block, num_blocks_within
from swarm.serving.model_files import open_model, tensor_sizes
from swarm.serving.server_options import ServerOptions
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

BLOCK_BYTES = 4 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32)
ENDS_BYTES = 4 * (2 * 256 * 32 + 32)
KV_BYTES = 1000


def test_load_measures_and_counts_the_room(llama_dir: Path) -> None:
    loaded = load(llama_dir, 0, 3, ServerOptions(kv_bytes=3840))
    assert loaded.kv_tokens == 10
    assert loaded.speed.kv_bytes_per_token == 384
    assert loaded.speed.prefill_ms > 0
    assert loaded.speed.decode_ms > 0
    assert loaded.revision == open_model(llama_dir).revision()
    assert loaded.max_step_tokens == ServerOptions().max_step_tokens


def test_load_wide_model_takes_shorter_steps(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", limits.MAX_OPEN_BYTES + 4 * 32 * 100)
    assert load(llama_dir, 0, 3, ServerOptions()).max_step_tokens == 100


def test_load_model_too_wide_for_one_row_is_refused(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", limits.MAX_OPEN_BYTES + 4 * 255)
    with pytest.raises(ConfigError, match="too wide"):
        load(llama_dir, 0, 3, ServerOptions())


def test_load_files_too_large_for_one_message_are_refused_before_any_client_asks(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is within its own bound."""
    directory = shutil.copytree(llama_dir, tmp_path / "model")
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", limits.MAX_OPEN_BYTES + 2**20)
    for name in ("vocab.json", "vocab.txt"):
        (directory / name).write_bytes(bytes(2**20 - 2**10))
    with pytest.raises(ConfigError, match="larger than a message"):
        load(directory, 0, 1, ServerOptions())


def test_measure_block_needs_one_block_only(llama_dir: Path) -> None:
    assert measure_block(open_model(llama_dir), ServerOptions()).kv_bytes_per_token == 128


@pytest.mark.parametrize(("num_blocks", "spare"), [(1, 0), (2, 0), (2, BLOCK_BYTES - 1), (6, 10**9)])
def test_num_blocks_within_counts_cache_and_ends(llama_dir: Path, num_blocks: int, spare: int) -> None:
    files = open_model(llama_dir)
    assert sum(tensor_sizes(files).values()) * 4 == 6 * BLOCK_BYTES + ENDS_BYTES
    max_bytes = num_blocks * BLOCK_BYTES + ENDS_BYTES + KV_BYTES + spare
    assert num_blocks_within(files, max_bytes, ServerOptions(kv_bytes=KV_BYTES)) == num_blocks


def test_num_blocks_within_half_precision_takes_half(llama_dir: Path) -> None:
    options = ServerOptions(kv_bytes=KV_BYTES, dtype="bfloat16")
    assert options.dtype == "bfloat16"
    assert torch.bfloat16.itemsize == 2
    assert num_blocks_within(open_model(llama_dir), BLOCK_BYTES + ENDS_BYTES // 2 + KV_BYTES, options) == 2


def test_num_blocks_within_too_little_says_what_one_takes(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match=f"one takes {BLOCK_BYTES}"):
        num_blocks_within(open_model(llama_dir), BLOCK_BYTES, ServerOptions(kv_bytes=KV_BYTES))
