"""One server and what it is sent, step by step: what it answers, and what it refuses before it computes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_session import HIDDEN, TOKENS, ask, session
from swarm.serving.blocks import Want, load_span
from swarm.serving.model_files import open_model
from swarm.serving.server_options import ServerOptions
from swarm.serving.tensors import unpack_floats
from swarm.testing import virtual_time
from swarm_protocol.errors import (
    PeerViolation,
)


def test_step_returns_the_span_own_hidden_states(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, session(box) as stream:
            result = await ask(stream, TOKENS)
            span = load_span(open_model(llama_dir), 0, 3)
            expected = span.run(TOKENS, span.new_cache(), Want.ALL)
            assert result.tensor is not None
            assert expected is not None
            assert torch.equal(unpack_floats(result.tensor, 3, 32), expected)
            assert result.position == 3
            assert result.compute_ms > 0
            assert result.leave_within_s is None

    virtual_time.run(scenario())


BAD_STEPS = {
    "position beyond the cache": (TOKENS, {"position": 1}, "the cache ends at 0"),
    "more than it reserved": (torch.zeros(17, dtype=torch.int64), {}, "the session reserved 16"),
    "unknown token": (torch.tensor([256]), {}, "vocabulary"),
    "hidden states for the first span": (HIDDEN, {}, "token ids have shape"),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_step_that_breaks_the_rules_ends_the_session_with_a_violation(boxes: Any, llama_dir: Path, case: str) -> None:
    x, options, message = BAD_STEPS[case]

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            async with session(box) as stream, session(box) as other:
                with pytest.raises(PeerViolation, match=message):
                    await ask(stream, x, **options)
                assert (await ask(other, TOKENS)).position == 3  # everyone else is unharmed
            await box.all_freed()

    virtual_time.run(scenario())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.full((2, 32), float("nan")), "not all finite"),
        (torch.zeros(2, 31), "of shape"),
        (TOKENS, "of shape"),
    ],
    ids=["nan", "width", "tokens"],
)
def test_step_of_bad_hidden_states_is_refused_before_compute(
    boxes: Any, llama_dir: Path, x: torch.Tensor, message: str
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(3, 6)]) as box, session(box) as stream:
            server = box.servers[box.who["s0"]]
            with pytest.raises(PeerViolation, match=message):
                await ask(stream, x)
            assert server.engine.num_done == 0

    virtual_time.run(scenario())


def test_step_longer_than_the_server_takes_is_refused(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        options = ServerOptions(max_step_tokens=2)
        async with boxes(llama_dir, [(0, 3)], options=options) as box, session(box) as stream:
            with pytest.raises(PeerViolation, match="a step of 3 tokens, and this server takes 2"):
                await ask(stream, TOKENS)

    virtual_time.run(scenario())


def test_step_going_back_is_refused(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, session(box) as stream:
            await ask(stream, TOKENS)
            with pytest.raises(PeerViolation, match="position 0, and the cache ends at 3"):
                await ask(stream, TOKENS)

    virtual_time.run(scenario())


def test_sessions_take_turns(boxes: Any, llama_dir: Path) -> None:
    """Eight clients of eight steps each: no one is more than one step ahead of another."""

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            counts = [0] * 8

            async def client(index: int) -> None:
                async with session(box) as stream:
                    for position in range(8):
                        await ask(stream, TOKENS[:1], position)
                        counts[index] += 1
                        assert max(counts) - min(counts) <= 1

            async with asyncio.TaskGroup() as tasks:
                for index in range(8):
                    tasks.create_task(client(index))

    virtual_time.run(scenario())
