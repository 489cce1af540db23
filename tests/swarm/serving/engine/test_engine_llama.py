"""A real model in two spans, each with its engine: batches, pages and prefixes do not change any token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.arithmetic_span import GREEDY, REVISION, ids
from support.leaks import no_leaks
from swarm.serving.engine.engine import Engine
from swarm.serving.engine.sequence import EngineSequence
from swarm.serving.model.batch import Want
from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span import Span
from swarm.serving.model.span_loading import load_span
from swarm.serving.server.deployment import ServerOptions
from swarm.serving.wire.page_keys import page_keys
from swarm.testing import virtual_time

VOCAB = 256
NUM_TOKENS = 8
NUM_PAGES = 96


@pytest.fixture(scope="module")
def spans(llama_dir: Path) -> list[Span]:
    return [load_span(open_model(llama_dir), start, start + 3) for start in (0, 3)]


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    # 0 is the padding, which transformers would mask
    return [1 + (seed * 37 + index * 11) % (VOCAB - 1) for index in range(num_tokens)]


@asynccontextmanager
async def engines(spans: Sequence[Span]) -> AsyncIterator[list[Engine]]:
    options = ServerOptions(max_step_ms=1e9, max_alone_ms=1e9, max_step_tokens=32)
    running = [Engine(span, span.new_pool(NUM_PAGES), options, revision=REVISION) for span in spans]
    tasks = [asyncio.create_task(engine.run()) for engine in running]
    try:
        yield running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for engine in running:
            engine.close(wait=True)
            assert engine.pages.num_free == NUM_PAGES


async def answer(sequences: Sequence[EngineSequence], rows: Sequence[int], num_tokens: int) -> list[int]:
    """Return the greedy tokens of a chain of two, fed with the rows that it does not hold yet."""
    found: list[int] = []
    while True:
        hidden = await sequences[0].step(ids(*rows), Want.ALL)
        assert hidden.output is not None
        last = await sequences[1].step(hidden.output, Want.NOTHING, GREEDY)
        found += [token.token_id for token in last.tokens]
        if len(found) == num_tokens:
            return found
        rows = found[-1:]


def opened(running: Sequence[Engine], prompt: Sequence[int], client: str = "a") -> list[EngineSequence]:
    keys = page_keys(REVISION, prompt)[: (len(prompt) - 1) // PAGE_TOKENS]
    return [
        engine.open(
            client=client,
            start=at,
            end=at + 3,
            max_tokens=len(prompt) + NUM_TOKENS,
            may_skip=len(prompt) + NUM_TOKENS,
            page_keys=keys,
        )
        for engine, at in zip(running, (0, 3), strict=True)
    ]


def test_engine_llama_gives_sixteen_sessions_the_tokens_of_transformers(
    spans: list[Span], llama_dir: Path, local_tokens: Any
) -> None:
    prompts = [prompt_of(2 + 4 * seed, seed) for seed in range(16)]

    async def run() -> None:
        async with engines(spans) as running:

            async def one(prompt: list[int]) -> list[int]:
                sequences = opened(running, prompt)
                found = await answer(sequences, prompt, NUM_TOKENS)
                for sequence in sequences:
                    sequence.close()
                return found

            found = await asyncio.gather(*map(one, prompts))
            assert found == [local_tokens(llama_dir, prompt, NUM_TOKENS) for prompt in prompts]
            # the sessions run together and not one after another
            assert max(engine.num_passes for engine in running) < 48  # of 128 steps

    with no_leaks():
        virtual_time.run(run())


def test_engine_llama_gives_the_same_tokens_when_a_prefix_is_cached(
    spans: list[Span], llama_dir: Path, local_tokens: Any
) -> None:
    prompt = prompt_of(3 * PAGE_TOKENS, 1)
    expected = local_tokens(llama_dir, prompt, NUM_TOKENS)

    async def run() -> None:
        async with engines(spans) as running:
            for held in (0, 2 * PAGE_TOKENS):
                sequences = opened(running, prompt)
                assert [sequence.length for sequence in sequences] == [held, held]
                assert await answer(sequences, prompt[held:], NUM_TOKENS) == expected
                for sequence in sequences:
                    sequence.close()

    virtual_time.run(run())


def test_engine_llama_gives_the_same_tokens_when_a_sequence_moves_in_mid_answer(
    spans: list[Span], llama_dir: Path, local_tokens: Any
) -> None:
    prompt = prompt_of(21, 2)
    expected = local_tokens(llama_dir, prompt, NUM_TOKENS)

    async def run() -> None:
        async with engines([spans[0], spans[1], spans[1]]) as running:
            first, second = opened(running[:2], prompt)
            begun = await answer([first, second], prompt, 3)
            third = running[2].open(client="a", start=3, end=6, max_tokens=second.max_tokens)
            await third.adopt(second.length, second.export(*second.blocks))
            second.close()
            assert begun + await answer([first, third], begun[-1:], NUM_TOKENS - 3) == expected

    virtual_time.run(run())
