"""A span that is loaded for a server."""

from __future__ import annotations

import asyncio
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from swarm.serving.engine.span_speed import CHOOSE_EVERY, StepTrials
from swarm.serving.model.model_files import open_model, weight_sizes
from swarm.serving.server.capability import measure_block, weigh
from swarm.serving.server.deployment import Deployment, ServerOptions, load
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError


def test_load_may_use_all_threads_while_another_span_uses_fewer(llama_dir: Path) -> None:
    usual = torch.get_num_threads()

    async def load() -> int:
        deployment = await Deployment.load(llama_dir, 2, 4, ServerOptions(kv_bytes=2**20))
        await deployment.close()
        return deployment.loaded.span.num_threads

    with ThreadPoolExecutor(1) as stepping:
        stepping.submit(torch.set_num_threads, usual + 1).result()
        try:
            assert asyncio.run(load()) == usual
        finally:
            stepping.submit(torch.set_num_threads, usual).result()


def test_measure_again_chooses_threads_anew_at_first_and_seldom_later(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, as when several servers load at once, a second thread looks useless while loading."""
    worth = 0.5

    def step_ms(_trials: StepTrials, _num_rows: int, num_threads: int | None = None, *, num_steps: int) -> float:
        assert num_steps
        return worth if num_threads == 2 else 1.0

    async def measure_again(num_times: int) -> dict[int, int]:
        for _ in range(num_times):
            await deployment.measure_again()
        return dict(span.step_threads)

    async def scenario() -> None:
        nonlocal worth
        assert await measure_again(1) == {1: 2, 16: 2}
        worth = 0.9
        assert await measure_again(CHOOSE_EVERY - 1) == {1: 2, 16: 2}
        assert await measure_again(1) == {1: 1, 16: 1}
        await deployment.close()

    monkeypatch.setattr(StepTrials, "step_ms", step_ms)
    deployment = asyncio.run(Deployment.load(llama_dir, 2, 4, ServerOptions(kv_bytes=2**20)))
    span = deployment.loaded.span
    span.num_threads, span.step_threads = 2, {1: 1, 16: 1}
    asyncio.run(scenario())


BLOCK_BYTES = 4 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32)
ENDS_BYTES = 4 * (2 * 256 * 32 + 32)


def test_load_measures_and_counts_the_room(llama_dir: Path) -> None:
    loaded = load(llama_dir, 0, 3, ServerOptions(kv_bytes=384 * 47))
    assert loaded.kv_tokens == 32
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


def test_load_refuses_files_that_are_together_too_large_for_one_message(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is within its own bound."""
    directory = shutil.copytree(llama_dir, tmp_path / "model")
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", limits.MAX_OPEN_BYTES + 2**20)
    for name in ("vocab.json", "vocab.txt"):
        (directory / name).write_text(json.dumps("a" * (2**20 - 2**11)))
    with pytest.raises(ConfigError, match="larger than a message"):
        load(directory, 0, 1, ServerOptions())


def test_measure_block_needs_one_block_only(llama_dir: Path) -> None:
    assert measure_block(open_model(llama_dir), ServerOptions()).kv_bytes_per_token == 128


def test_weigh_counts_each_tensor_once(llama_dir: Path) -> None:
    files = open_model(llama_dir)
    assert sum(weight_sizes(files).values()) * 4 == 6 * BLOCK_BYTES + ENDS_BYTES
    needs = weigh(files, ServerOptions())
    assert (needs.block_bytes, needs.ends_bytes, needs.loading_bytes) == (BLOCK_BYTES, ENDS_BYTES, 0)


def test_weigh_half_precision_takes_half(llama_dir: Path) -> None:
    needs = weigh(open_model(llama_dir), ServerOptions(dtype="bfloat16"))
    assert (needs.block_bytes, needs.ends_bytes, needs.loading_bytes) == (BLOCK_BYTES // 2, ENDS_BYTES // 2, 0)
