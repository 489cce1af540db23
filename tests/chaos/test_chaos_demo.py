"""kill -9 on real processes over real libp2p, at moments drawn by chance, again and again: `make chaos`.

The seed of each trial is its number, so that one that failed can be repeated alone.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from swarm.training.export import export_hf
from swarm.training.model import initial_theta
from swarm.training.run_config import DEFAULT_MODEL, RunConfig
from swarm.training.run_file import write_run
from swarm_node.demo import reference
from swarm_node.demo.board import Board, Event
from swarm_node.demo.nodes import Fleet
from swarm_protocol.identity import Identity

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

NUM_NODES = 4
OUTER_STEPS = 5
NUM_TRAINING_TRIALS = 5
NUM_SERVING_TRIALS = 10
PROMPT = "def fibonacci(n):\n"
MAX_TOKENS = 120


def _no_hook(_name: str, _event: Event) -> None:
    """Nobody listens."""


async def _seed(fleet: Fleet) -> str:
    await fleet.spawn("seed", "seed")
    seed = fleet.board.node("seed")
    await fleet.until(lambda: bool(seed.addrs), within_s=120, what="starting the seed")
    return seed.addrs[0]


@pytest.mark.parametrize("trial", range(NUM_TRAINING_TRIALS))
def test_training_survivors_stay_identical_when_a_member_is_killed_in_a_round(tmp_path: Path, trial: int) -> None:
    """Even trials: as soon as the victim has finished an interval, so in the round; odd: any time after a step."""
    chance = random.Random(trial)
    victim, fatal_step = f"node-{chance.randint(1, NUM_NODES)}", chance.randint(2, OUTER_STEPS - 1)
    wanted = "interval" if trial % 2 == 0 else "outer_step"
    delay_s = chance.uniform(0.0, 0.2 if trial % 2 == 0 else 2.0)
    reached = asyncio.Event()

    def hook(name: str, event: Event) -> None:
        if (name, event["event"], event.get("step")) == (victim, wanted, fatal_step):
            reached.set()

    async def main() -> Board:
        board = Board(num_nodes=NUM_NODES)
        async with Fleet(tmp_path, board, hook) as fleet:
            run = RunConfig(name="chaos", outer_steps=OUTER_STEPS, interval_steps=6, max_group=NUM_NODES)
            write_run(tmp_path / "run.toml", run, Identity.generate())
            addr = await _seed(fleet)
            for index in range(NUM_NODES):
                options = ("--run", str(tmp_path / "run.toml"), "--threads", "1")
                await fleet.spawn(f"node-{index + 1}", "join", "--peers", addr, *options)
            await fleet.until(reached.is_set, within_s=300, what="reaching the fatal moment")
            await asyncio.sleep(delay_s)
            fleet.kill(victim)
            survivors = {node.name for node in board.trainers} - {victim}
            await fleet.until(
                lambda: board.digests.get(OUTER_STEPS, {}).keys() >= survivors, within_s=300, what="the last step"
            )
        return board

    board = asyncio.run(main())
    assert board.digests_equal()
    assert len(board.digests[OUTER_STEPS]) >= NUM_NODES - 1


def test_answers_stay_identical_when_servers_are_killed_in_mid_stream(tmp_path: Path) -> None:
    """One swarm, ten answers, ten deaths; each dead node is replaced by a new one before the next answer."""
    # random weights of which the seed is chosen such that the text goes on to the end
    run = RunConfig(name="chaos", seed=3, model={**DEFAULT_MODEL, "initializer_range": 0.1})
    export_hf(initial_theta(run), run, tmp_path / "chaos")
    expected = reference.complete(tmp_path / "chaos", PROMPT, MAX_TOKENS)
    num_blocks = int(DEFAULT_MODEL["num_hidden_layers"])
    failovers_ms: list[float] = []

    async def main() -> None:
        board = Board(num_nodes=NUM_NODES)
        async with Fleet(tmp_path, board, _no_hook) as fleet:
            addr = await _seed(fleet)
            names = (f"node-{index}" for index in range(1, 1000))
            join = ("join", "--peers", addr, "--model", str(tmp_path / "chaos"))
            half = ("--max-blocks", str(num_blocks // 2), "--threads", "1", "--probe", "off")
            for _ in range(NUM_NODES):
                await fleet.spawn(next(names), *join, *half)
            await fleet.spawn("gateway", "gateway", "--peers", addr, "--port", "0")
            gateway = board.node("gateway")
            await fleet.until(lambda: bool(gateway.url), within_s=120, what="starting the gateway")
            async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as openai:
                for trial in range(NUM_SERVING_TRIALS):
                    await fleet.until(
                        lambda: board.survives_any_death(num_blocks), within_s=180, what="serving each block twice"
                    )
                    failovers_ms.append(await _trial(openai, fleet, random.Random(trial), expected))
                    await fleet.spawn(next(names), *join, *half)

    asyncio.run(main())
    print(
        f"\n{len(failovers_ms)} kills: longest pause p50 {statistics.median(failovers_ms):.0f} ms, "
        f"max {max(failovers_ms):.0f} ms"
    )


async def _trial(openai: AsyncOpenAI, fleet: Fleet, chance: random.Random, expected: str) -> float:
    """One answer with one death in it. Returns the longest pause between tokens after it, in milliseconds."""
    fatal_token = chance.randint(1, MAX_TOKENS // 2)
    texts: list[str] = []
    pause_s, last_s = 0.0, time.monotonic()
    stream = await openai.completions.create(
        model="chaos", prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0, stream=True
    )
    async for chunk in stream:
        trace_id = chunk.id
        texts.append(chunk.choices[0].text)
        if len(texts) > fatal_token:
            pause_s = max(pause_s, time.monotonic() - last_s)
        if len(texts) == fatal_token:
            await asyncio.sleep(chance.uniform(0, 0.05))
            trace: Any = await openai.get(f"/traces/{trace_id}", cast_to=dict[str, Any])
            victim = fleet.board.by_peer(chance.choice(trace["hops"])["peer_id"])
            assert victim is not None
            fleet.kill(victim.name)
        last_s = time.monotonic()
    assert "".join(texts) == expected
    trace = await openai.get(f"/traces/{trace_id}", cast_to=dict[str, Any])
    assert trace["replays"], "the answer was over before the death could matter"
    return pause_s * 1000
