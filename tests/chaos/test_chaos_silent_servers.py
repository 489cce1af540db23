"""Servers that stop in mid-answer and do not crash: their process, their libp2p daemon, or their line. Also servers
whose process hardly runs.

    .venv/bin/python -m pytest tests/chaos/test_chaos_silent_servers.py -m chaos -s

Nobody is told of such a stop: the machine's kernel keeps the connections open. Each server is continued once the answer
is over, so that the next trial finds it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from chaos.test_chaos_serving import LONG, SHORT, write_model
from support.network_namespaces import dropping, own_loopback
from support.serving_fleet import ServingFleet, serving_fleet
from swarm.client import SamplingParams
from swarm_node.demo import demo_answer
from swarm_node.demo.nodes import NodeState

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

SPANS = ((0, 2), (2, 4), (4, 6))
STOPS = (("process", (0,)), ("process", (1,)), ("process", (2,)), ("daemon", (1, 2)))
LINES = (("line", (1,)),)
PHASES = ("decode", "prefill")
NUM_TOKENS = 96
FATAL_TOKEN = 24
BACK_S = 20.0
NUM_SLOWED_TOKENS = 500
RUN_S, PERIOD_S = 0.005, 0.2
RATE_TOKENS = 50


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def _throttled(pid: int) -> Iterator[None]:
    """Let the process run for RUN_S of every PERIOD_S."""
    over = threading.Event()

    def throttle() -> None:
        while not over.is_set():
            with _stopped(pid):
                over.wait(PERIOD_S - RUN_S)
            time.sleep(RUN_S)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _silenced(servers: ServingFleet, node: NodeState, what: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the server, its daemon or its line is stopped."""
    process = psutil.Process(servers.fleet.processes[node.name].process.pid)
    if what == "process":
        return _stopped(process.pid)
    (daemon,) = process.children()
    if what == "daemon":
        return _stopped(daemon.pid)
    return dropping({connection.laddr.port for connection in daemon.net_connections("tcp")})


async def _trial(servers: ServingFleet, what: str, places: tuple[int, ...], phase: str) -> tuple[str, float, list[str]]:
    """Get one answer during which servers fall silent. Return the text, the longest pause in seconds from then on, and
    why servers were replaced."""
    generation = servers.client.generate(
        model="chaos",
        prompt=LONG if phase == "prefill" else SHORT,
        max_tokens=NUM_TOKENS,
        sampling=SamplingParams(temperature=0.0),
    )
    texts, times = list[str](), list[float]()
    with ExitStack() as silent:

        def strike() -> None:
            for place in places:
                peer_id = generation.trace()["hops"][place]["peer_id"]
                silent.enter_context(_silenced(servers, servers.find(peer_id), what))
            times.append(time.monotonic())

        async def strike_soon() -> None:
            while not generation.trace()["hops"]:
                await asyncio.sleep(0.001)
            strike()

        async with contextlib.aclosing(generation), asyncio.TaskGroup() as tasks:
            if phase == "prefill":
                tasks.create_task(strike_soon())
            async for token in generation:
                texts.append(token.text)
                if phase == "decode" and len(texts) == FATAL_TOKEN:
                    strike()
                elif times:
                    times.append(time.monotonic())
    pause_s = max(after - before for before, after in pairwise(times))
    return "".join(texts), pause_s, [replay["reason"] for replay in generation.trace()["replays"]]


async def _until_back(servers: ServingFleet) -> None:
    """Wait until all servers are listed, without a session, and answer pings."""
    async with asyncio.timeout(BACK_S):
        while True:
            records = await servers.client.servers("chaos")
            if len(records) == 2 * len(SPANS) and not any(record.queue_depth for record in records.values()):
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("cases", [STOPS, LINES], ids=["stops", "lines"])
def test_tokens_are_unchanged_when_servers_fall_silent_and_the_pause_is_short(
    tmp_path: Path, cases: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    model = write_model(tmp_path / "chaos")
    expected = {prompt: demo_answer.complete_undisturbed(model, prompt, NUM_TOKENS) for prompt in (SHORT, LONG)}
    pauses_s: dict[str, list[float]] = {phase: [] for phase in PHASES}

    async def main() -> None:
        async with serving_fleet(tmp_path, model, 2 * SPANS, "--threads", "1") as servers:
            for number, (what, places) in enumerate(cases):
                phase = PHASES[number % 2]
                text, pause_s, reasons = await _trial(servers, what, places, phase)
                print(f"{what:>8} {places} {phase:>8}: {pause_s:.2f} s, {', '.join(reasons)}")
                assert text == expected[LONG if phase == "prefill" else SHORT], f"{what} of {places} in {phase}"
                assert len(reasons) >= len(places), "each silent server must have been replaced"
                pauses_s[phase].append(pause_s)
                await _until_back(servers)

    with own_loopback() if cases is LINES else contextlib.nullcontext():
        asyncio.run(main())
    assert statistics.median(pauses_s["decode"]) < 4
    assert max(pauses_s["decode"]) < 8
    assert max(pauses_s["prefill"], default=0.0) < 12, "a ping may wait behind the rows of a prompt, and has 6 s"


def _rate(times: list[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


async def _slowed(servers: ServingFleet, place: int) -> tuple[str, list[float], list[tuple[str, bool]]]:
    """Get one answer during which a server's process hardly runs. Return the text, the tokens a second before that,
    then, and at the end, and why servers were left, with whether they handed over."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    generation = servers.client.generate(model="chaos", prompt=SHORT, max_tokens=NUM_SLOWED_TOKENS, sampling=sampling)
    texts, times = list[str](), list[float]()
    with ExitStack() as slow:
        async with contextlib.aclosing(generation):
            async for token in generation:
                texts.append(token.text)
                times.append(time.monotonic())
                if len(texts) == RATE_TOKENS:
                    node = servers.find(generation.trace()["hops"][place]["peer_id"])
                    slow.enter_context(_throttled(servers.fleet.processes[node.name].process.pid))
    rates = [_rate(times[at : at + RATE_TOKENS]) for at in (0, RATE_TOKENS, len(times) - RATE_TOKENS)]
    left = [(replay["reason"], replay["was_handed_over"]) for replay in generation.trace()["replays"]]
    return "".join(texts), rates, left


def test_answer_moves_away_from_a_server_that_hardly_runs_with_the_same_tokens(tmp_path: Path) -> None:
    model = write_model(tmp_path / "chaos")
    expected = demo_answer.complete_undisturbed(model, SHORT, NUM_SLOWED_TOKENS)

    async def main() -> None:
        async with serving_fleet(tmp_path, model, 2 * SPANS, "--threads", "1") as servers:
            for place in range(len(SPANS)):
                text, (before, slow, after), left = await _slowed(servers, place)
                print(f"place {place}: {before:.1f}, then {slow:.1f}, then {after:.1f} tokens/s; {left}")
                assert text == expected
                assert ("the server has become slow", True) in left
                assert after > 2 * slow
                await _until_back(servers)

    asyncio.run(main())
