"""kill -9 of servers in mid-answer, and a swarm that changes under a steady load; real processes, real libp2p.

    .venv/bin/python -m pytest tests/chaos/test_chaos_serving.py -m chaos -s

The seed of each trial is its number, so that one that failed can be repeated alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from support.serving_fleet import ServingFleet, serving_fleet
from swarm.client import Generation, SamplingParams
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import initial_theta
from swarm.training.run.run_tables import DEFAULT_MODEL
from swarm.training.state.export import export_hf
from swarm_node.demo import demo_answer
from swarm_node.demo.nodes import NodeState

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

NUM_TRIALS = 100
PHASES = ("prefill", "decode", "between", "hand-over")
MIDDLE = (2, 4)
SPANS = ((0, 2), MIDDLE, MIDDLE, MIDDLE, (4, 6))
SHORT = "def fibonacci(n):\n"
LONG = "".join(f"x{i} = {i} * {i + 1}\n" for i in range(50))  # some 800 tokens
NUM_TOKENS = 48
TEMPERATURES = (0.0, 0.8)
SEED = 7
LEAVING_S = 0.08  # a handover takes less
NUM_STREAMS = 8
NUM_CHANGES = 6


def write_model(directory: Path) -> Path:
    """Write a model of random weights, with a seed for which texts do not end early."""
    run = RunConfig(name="chaos", seed=3, model={**DEFAULT_MODEL, "initializer_range": 0.1})
    export_hf(initial_theta(run), run, directory)
    return directory


def _generation(servers: ServingFleet, prompt: str, temperature: float) -> Generation:
    return servers.client.generate(
        model="chaos",
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        sampling=SamplingParams(temperature=temperature, seed=SEED),
    )


async def _trial(servers: ServingFleet, number: int) -> tuple[str, float, bool]:
    """Get one answer during which its middle server dies. Return the text, the longest pause in seconds from then on,
    and whether the server was killed: one that was asked to leave may have handed over and left before."""
    phase, chance = PHASES[number % len(PHASES)], random.Random(number)
    generation = _generation(servers, LONG if phase == "prefill" else SHORT, TEMPERATURES[number // len(PHASES) % 2])
    fatal_token = chance.randint(1, NUM_TOKENS // 2)
    dying: asyncio.Task[NodeState] | None = None
    texts: list[str] = []
    pause_s, last_s = 0.0, time.monotonic()
    async with contextlib.aclosing(generation):
        if phase == "prefill":
            dying = asyncio.create_task(_die(servers, generation, phase, chance))
        async for token in generation:
            texts.append(token.text)
            if dying is not None:
                pause_s = max(pause_s, time.monotonic() - last_s)
            if len(texts) == fatal_token and dying is None:
                dying = asyncio.create_task(_die(servers, generation, phase, chance))
            if phase in ("between", "hand-over") and dying is not None and not dying.done():
                await asyncio.sleep(chance.uniform(0, 2 * LEAVING_S))
            last_s = time.monotonic()
    assert dying is not None
    assert dying.done(), "the answer ended before the server's death"
    process = servers.fleet.processes[dying.result().name].process
    assert generation.trace()["replays"], f"the end of a server in trial {number} caused no replay: {phase}"
    return "".join(texts), pause_s, await process.wait() == -signal.SIGKILL


def _middle(generation: Generation) -> str | None:
    """Return the peer that has the middle blocks now, or None before the chain is open."""
    hops = reversed(generation.trace()["hops"])
    return next((hop["peer_id"] for hop in hops if hop["start"] == MIDDLE[0]), None)


async def _die(servers: ServingFleet, generation: Generation, phase: str, chance: random.Random) -> NodeState:
    """Kill the middle server at a moment of `phase`, and return it."""
    while not (middle := _middle(generation)):
        await asyncio.sleep(0.001)
    victim = servers.find(middle)
    if phase == "hand-over":
        servers.drain(victim)
    # the long prompt takes a few hundred milliseconds and a token about ten; between two tokens nobody computes
    within_s = {"prefill": 0.1, "decode": 0.03, "between": 0.0, "hand-over": LEAVING_S}[phase]
    await asyncio.sleep(chance.uniform(0, within_s))
    if not servers.fleet.processes[victim.name].ended:
        servers.kill(victim)
    return victim


def test_tokens_are_unchanged_by_a_hundred_kills_in_all_phases(tmp_path: Path) -> None:
    model = write_model(tmp_path / "chaos")
    expected = {
        (prompt, temperature): demo_answer.complete_undisturbed(
            model, prompt, NUM_TOKENS, temperature=temperature, seed=SEED
        )
        for prompt in (SHORT, LONG)
        for temperature in TEMPERATURES
    }
    pauses_s: dict[str, list[float]] = defaultdict(list)

    async def main() -> None:
        async with serving_fleet(tmp_path, model, SPANS, "--threads", "1") as servers:
            for number in range(2 * NUM_TRIALS):
                phase, temperature = PHASES[number % len(PHASES)], TEMPERATURES[number // len(PHASES) % 2]
                text, pause_s, has_died = await _trial(servers, number)
                assert text == expected[LONG if phase == "prefill" else SHORT, temperature], f"trial {number}: {phase}"
                if has_died:
                    pauses_s[phase].append(pause_s)
                if sum(map(len, pauses_s.values())) == NUM_TRIALS:
                    return
                await servers.add(*MIDDLE)
                while len(servers.alive(*MIDDLE)) < 2:
                    await servers.until_serving(*servers.starting())

    asyncio.run(main())
    every_s = sorted(pause_s for phase in pauses_s.values() for pause_s in phase)
    p50_s, p99_s = statistics.median(every_s), every_s[int(0.99 * len(every_s))]
    for phase, of_phase_s in pauses_s.items():
        print(f"{phase:>10}: {len(of_phase_s)} kills, pause p50 {statistics.median(of_phase_s):.3f} s")
    print(f"{len(every_s)} kills: pause p50 {p50_s:.3f} s, p99 {p99_s:.3f} s, max {every_s[-1]:.3f} s")
    assert len(every_s) == NUM_TRIALS
    assert min(len(pauses_s[phase]) for phase in PHASES) >= NUM_TRIALS // 8
    assert p50_s < 1
    assert p99_s < 3


def test_no_request_fails_under_steady_load_while_nodes_join_and_leave(tmp_path: Path) -> None:
    """There are eight endless streams. Repeatedly, one server joins, and another one of the same span drains and
    leaves."""
    model = write_model(tmp_path / "chaos")
    expected = demo_answer.complete_undisturbed(model, SHORT, NUM_TOKENS)
    outcomes: Counter[str] = Counter()

    async def ask(servers: ServingFleet, over: asyncio.Event) -> None:
        while not over.is_set():
            text = "".join([token.text async for token in _generation(servers, SHORT, 0.0)])
            outcomes["right" if text == expected else "wrong"] += 1

    async def main() -> None:
        async with serving_fleet(tmp_path, model, ((0, 2), MIDDLE, (4, 6)), "--threads", "1") as servers:
            over = asyncio.Event()
            async with asyncio.TaskGroup() as asking:
                for _ in range(NUM_STREAMS):
                    asking.create_task(ask(servers, over))
                for number in range(NUM_CHANGES):
                    span = ((0, 2), MIDDLE, (4, 6))[number % 3]
                    old = servers.alive(*span)[0]
                    await servers.until_serving(await servers.add(*span))
                    servers.drain(old)
                    await servers.fleet.processes[old.name].process.wait()
                    outcomes["changes"] += 1
                over.set()

    asyncio.run(main())
    print(f"\n{outcomes['right']} answers over {outcomes['changes']} joins and drains, {outcomes['wrong']} wrong")
    assert outcomes["changes"] == NUM_CHANGES
    assert outcomes["right"] > NUM_STREAMS
    assert not outcomes["wrong"]
