from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm.serving.blocks import Span, Want, load_span
from swarm.serving.engine import Engine, Step
from swarm.serving.model_files import open_model
from swarm.testing import virtual_time
from swarm.testing.leaks import no_leaks


@pytest.fixture(scope="module")
def span(llama_dir: Path) -> Span:
    return load_span(open_model(llama_dir), 0, 2)


def step(span: Span, cache: Any = None, num_tokens: int = 1) -> Step:
    x = torch.zeros(num_tokens, dtype=torch.int64)
    return Step(span=span, cache=cache or span.new_cache(), position=0, x=x, want=Want.LAST)


async def with_engine(work: Any) -> Any:
    engine = Engine()
    running = asyncio.create_task(engine.run())
    try:
        return await work(engine)
    finally:
        running.cancel()
        engine.close(wait=True)


def test_engine_runs_steps_in_the_order_they_came(span: Span) -> None:
    async def work(engine: Engine) -> None:
        order: list[int] = []

        async def submit(index: int) -> None:
            await engine.submit(step(span))
            order.append(index)

        async with asyncio.TaskGroup() as tasks:
            for index in range(6):
                tasks.create_task(submit(index))
        assert order == list(range(6))
        assert engine.num_done == engine.num_tokens == 6

    with no_leaks():
        virtual_time.run(with_engine(work))


def test_engine_step_that_fails_fails_its_submitter_only(span: Span) -> None:
    async def work(engine: Engine) -> None:
        bad = Step(span=span, cache=span.new_cache(), position=0, x=torch.tensor([10**6]), want=Want.LAST)
        results = await asyncio.gather(
            engine.submit(step(span)), engine.submit(bad), engine.submit(step(span)), return_exceptions=True
        )
        assert [isinstance(result, Exception) for result in results] == [False, True, False]

    virtual_time.run(with_engine(work))


def test_engine_cancelled_step_that_waits_is_never_run(span: Span) -> None:
    async def work(engine: Engine) -> None:
        cache = span.new_cache()
        first = asyncio.create_task(engine.submit(step(span)))
        second = asyncio.create_task(engine.submit(step(span, cache)))
        await asyncio.sleep(0)
        second.cancel()
        await first
        await engine.submit(step(span))
        assert cache.length == 0
        assert engine.num_done == 2

    virtual_time.run(with_engine(work))


def test_engine_waiting_time_is_told(span: Span) -> None:
    async def work(engine: Engine) -> None:
        done = await asyncio.gather(*(engine.submit(step(span)) for _ in range(3)))
        assert [round(result.queue_ms) for result in done] == [0, 100, 200]

    virtual_time.run(with_engine(work), compute_s=lambda function: 0.1)
