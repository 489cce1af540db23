"""A span that is loaded for a server."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from swarm.serving.engine.span_speed import StepTrials
from swarm.serving.model.model_files import open_model, weight_sizes
from swarm.serving.model.span import STEPS
from swarm.serving.server.capability import measure_block, weigh
from swarm.serving.server.deployment import CHOOSE_LATER_S, CHOOSE_SOON_S, Deployment, ServerOptions, load
from swarm.testing import virtual_time
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


@asynccontextmanager
async def started(llama_dir: Path, step_threads: int) -> AsyncIterator[Deployment]:
    """Yield a running deployment that may use two threads, and chose `step_threads` while loading."""
    deployment = await Deployment.load(llama_dir, 2, 4, ServerOptions(kv_bytes=2**20))
    deployment.loaded.span.num_threads = 2
    deployment.loaded.span.step_threads = dict.fromkeys(STEPS, step_threads)
    async with asyncio.TaskGroup() as tasks:
        deployment.start(tasks)
        yield deployment
        await deployment.close()


@pytest.fixture
def two_threads_ms(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The measured time of a step with two threads, where one thread takes 1 ms: set its only item."""
    found_ms = [0.5]

    def step_ms(_trials: StepTrials, _num_rows: int, num_threads: int | None = None, *, num_steps: int) -> float:
        assert num_steps
        return found_ms[0] if num_threads == 2 else 1.0

    monkeypatch.setattr(StepTrials, "step_ms", step_ms)
    return found_ms


def test_server_chooses_threads_again_soon_after_loading_and_seldom_later(
    llama_dir: Path, two_threads_ms: list[float]
) -> None:
    """On a busy machine, as when several servers load at once, a second thread looks useless while loading."""

    async def scenario() -> None:
        async with started(llama_dir, step_threads=1) as deployment:
            announced = deployment.speed
            await asyncio.sleep(CHOOSE_SOON_S)
            assert deployment.loaded.span.step_threads == {1: 2, 16: 2}
            assert deployment.speed == announced, "only passes and measurements of an idle span change it"
            two_threads_ms[0] = 0.9
            await asyncio.sleep(5 * CHOOSE_SOON_S)
            assert deployment.loaded.span.step_threads == {1: 2, 16: 2}
            await asyncio.sleep(CHOOSE_LATER_S)
            assert deployment.loaded.span.step_threads == {1: 1, 16: 1}

    virtual_time.run(scenario())


@pytest.mark.usefixtures("two_threads_ms")
def test_server_chooses_no_threads_while_it_has_a_session(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with started(llama_dir, step_threads=1) as deployment:
            sequence = deployment.engine.open(client="client", start=2, end=4, max_tokens=16)
            await asyncio.sleep(5 * CHOOSE_SOON_S)
            assert deployment.loaded.span.step_threads == {1: 1, 16: 1}
            sequence.close()
            await asyncio.sleep(CHOOSE_SOON_S)
            assert deployment.loaded.span.step_threads == {1: 2, 16: 2}

    virtual_time.run(scenario())


def test_choice_of_threads_ends_when_a_session_opens(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_trials = 0

    async def scenario() -> None:
        async with started(llama_dir, step_threads=1) as deployment:
            in_thread = deployment.engine.in_thread

            async def open_meanwhile(*work: Any) -> Any:
                nonlocal num_trials
                num_trials += 1
                deployment.engine.open(client="client", start=2, end=4, max_tokens=16)
                return await in_thread(*work)

            monkeypatch.setattr(deployment.engine, "in_thread", open_meanwhile)
            await asyncio.sleep(5 * CHOOSE_SOON_S)

    virtual_time.run(scenario())
    assert num_trials == 1


def test_servers_that_start_together_choose_threads_at_different_moments(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen_s: list[float] = []

    async def choose(_: Deployment) -> bool:
        chosen_s.append(asyncio.get_running_loop().time())
        return True

    async def scenario() -> None:
        async with started(llama_dir, step_threads=1), started(llama_dir, step_threads=1):
            await asyncio.sleep(CHOOSE_SOON_S)

    monkeypatch.setattr(Deployment, "_choose_threads", choose)
    virtual_time.run(scenario())
    assert len(set(chosen_s)) == 2


def test_server_goes_on_when_its_threads_cannot_be_chosen(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with started(llama_dir, step_threads=1):
            await asyncio.sleep(CHOOSE_SOON_S)

    monkeypatch.setattr(Deployment, "_choose_threads", AsyncMock(side_effect=MemoryError("no memory for the trial")))
    virtual_time.run(scenario())
    assert "no memory for the trial" in caplog.text


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
