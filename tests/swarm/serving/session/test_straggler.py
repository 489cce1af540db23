"""When a session leaves a server that has become slow: the rule alone, and sessions on a simulated internet."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
from support.plain_records import serve_record
from swarm.router.routing import Hop
from swarm.serving.server.deployment import ServerOptions
from swarm.serving.session.peer_health import SUSPECTED_S
from swarm.serving.session.stage import Neighbours, Stage
from swarm.serving.session.step_timer import RECENT_PASSES
from swarm.serving.session.straggler import LOOK_S, PAUSE_S, WAIT_S, Straggler, StragglerWatch
from swarm.testing import virtual_time
from swarm_protocol.records import ServeRecord

PROMISED_MS = 10.0
NUM_TOKENS = 120
SLOW_S = 0.5


def stages_of(*times_ms: float, fed_by_client: int | None = None, is_local: int | None = None) -> list[Stage]:
    """Return stages that took these times for each token, and push to each other."""
    stages = []
    for index, ms in enumerate(times_ms):
        record = serve_record(index, index + 1, num_blocks=len(times_ms))
        hop = Hop(peer_id=f"s{index}", start=index, end=index + 1, cost_ms=PROMISED_MS, record=record)
        stage = Stage(hop=hop, row_bytes=8, output_row_bytes=8, is_local=index == is_local)
        stage.timer.times_ms.extend([ms] * RECENT_PASSES)
        if stages and index != fed_by_client:
            stages[-1].link.neighbours = Neighbours(downstream=stage)
        stages.append(stage)
    return stages


def found_within(watch: StragglerWatch, stages: Sequence[Stage], start_s: float, end_s: float) -> list[float]:
    """Return when the watch named a stage, looked at ten times a second of an answer that goes on at this speed."""
    times_s, begun = [start_s + tenth / 10 for tenth in range(round(10 * (end_s - start_s)))], stages[-1].num_run
    found_s = []
    for now_s in times_s:
        stages[-1].num_run = begun + round(1000 * (now_s - start_s) / sum(stage.timer.recent_ms() for stage in stages))
        found_s += [now_s] if watch.find(stages, 100, now_s) is not None else []
    return found_s


def slowest_of(stages: Sequence[Stage]) -> Straggler | None:
    return StragglerWatch(0.0).find(stages, 100, 0.0)


def test_watch_names_the_slowest_stage_when_it_was_slow_for_long_enough() -> None:
    stages = stages_of(20.0, 300.0, 30.0)
    (first_s,) = found_within(StragglerWatch(WAIT_S), stages, 0.0, PAUSE_S)
    assert WAIT_S <= first_s <= WAIT_S + 2 * LOOK_S
    found = slowest_of(stages)
    assert found is not None
    assert (found.stage, found.pass_ms) == (stages[1], 300.0)
    assert found.slowdown == 2, "the best of the others takes twice as long as it promised"


def test_watch_doubles_the_pause_between_searches() -> None:
    times_s = found_within(StragglerWatch(0.0), stages_of(300.0), 0.0, 8 * PAUSE_S)
    assert len(times_s) == 4
    assert [round(at_s / PAUSE_S) for at_s in times_s] == [0, 1, 3, 7]


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(stages_of(20.0, 60.0, 15.0), id="fast enough to read"),
        pytest.param(stages_of(*[45.0] * 8), id="many stages, none of which is slow"),
        pytest.param(stages_of(20.0, 300.0, fed_by_client=1), id="the way over the client is slow"),
        pytest.param(stages_of(300.0, is_local=0), id="slow at home"),
        pytest.param([replace(stages_of(300.0)[0], replace_from_s=9.0)], id="its server leaves anyway"),
    ],
)
def test_watch_names_nobody_when_no_server_is_slow(stages: list[Stage]) -> None:
    assert not found_within(StragglerWatch(0.0), stages, 0.0, 2 * PAUSE_S)


def test_watch_names_nobody_for_one_long_wait_or_before_it_knows_enough_tokens() -> None:
    (stage,) = stages_of(20.0)
    stage.timer.times_ms.append(9000.0)
    assert slowest_of([stage]) is None
    stage.timer.times_ms.append(9000.0)
    assert slowest_of([stage]) is not None
    stage.timer.times_ms.popleft()
    assert slowest_of([stage]) is None


@pytest.mark.parametrize(("mean_ms", "is_slow"), [(85.0, False), (116.0, True)])
def test_watch_counts_the_mean_when_tokens_vary_around_the_limit(mean_ms: float, *, is_slow: bool) -> None:
    """Each look at the last tokens that saw a fast one began the wait again: at 116 ms a token it took half a
    minute."""
    chance, found_s = random.Random(0), []
    for _ in range(20):
        watch, (stage,), now_s = StragglerWatch(WAIT_S), stages_of(mean_ms), 0.0
        while now_s < PAUSE_S:
            token_ms = chance.gammavariate(10.0, mean_ms / 10)
            stage.timer.times_ms.append(token_ms)
            stage.num_run, now_s = stage.num_run + 1, now_s + token_ms / 1000
            found_s += [now_s] if watch.find([stage], 100, now_s) is not None else []
    assert len(found_s) == 20 * is_slow
    assert not is_slow or sum(found_s) / len(found_s) < 2 * WAIT_S


def test_watch_waits_only_from_the_time_when_it_knows_enough_tokens() -> None:
    """A prompt that waited would count, and the first tokens be too few for a move to pay."""
    watch, (stage,) = StragglerWatch(WAIT_S), stages_of(300.0)
    stage.timer.times_ms.popleft()
    assert not found_within(watch, [stage], 0.0, 3 * WAIT_S)
    stage.timer.times_ms.append(300.0)
    (first_s,) = found_within(watch, [stage], 3 * WAIT_S, PAUSE_S)
    assert first_s >= 4 * WAIT_S - LOOK_S


def test_watch_names_one_of_two_stages_that_are_slowest_in_turns() -> None:
    watch, stages = StragglerWatch(WAIT_S), stages_of(150.0, 160.0)
    found_s = []
    for look in range(round(2 * WAIT_S / LOOK_S)):
        stages[look % 2].timer.times_ms.extend([200.0] * RECENT_PASSES)
        stages[1 - look % 2].timer.times_ms.extend([150.0] * RECENT_PASSES)
        found_s += found_within(watch, stages, look * LOOK_S, (look + 1) * LOOK_S)
    assert found_s == [WAIT_S]


def test_watch_waits_anew_when_an_answer_that_was_fast_enough_becomes_slow() -> None:
    """Else all sessions of a server, which had answered at this speed for long, would leave it at the same moment."""
    watch, (stage,) = StragglerWatch(WAIT_S), stages_of(80.0)
    assert not found_within(watch, [stage], 0.0, 3 * WAIT_S)
    stage.timer.times_ms.extend([300.0] * RECENT_PASSES)
    (first_s,) = found_within(watch, [stage], 3 * WAIT_S, PAUSE_S)
    assert first_s >= 4 * WAIT_S - LOOK_S


@pytest.mark.parametrize(
    ("pass_ms", "slowdown", "num_passes", "promised_ms", "replay_s", "expected"),
    [
        (2000.0, 1.0, 100, 30.0, 5.0, True),
        (110.0, 1.0, 100, 8.0, 0.5, True),
        pytest.param(2000.0, 1.0, 100, 700.0, 5.0, False, id="others are not three times as fast"),
        pytest.param(60.0, 1.0, 1000, 15.0, 0.5, False, id="milliseconds"),
        pytest.param(2000.0, 1.0, 3, 30.0, 5.0, False, id="few tokens to come"),
        pytest.param(2000.0, 1.0, 100, 30.0, 250.0, False, id="a long prefix to run again"),
        pytest.param(2000.0, 30.0, 100, 30.0, 0.5, False, id="everything is slow here"),
    ],
)
def test_move_is_worth_it(
    pass_ms: float, slowdown: float, num_passes: int, promised_ms: float, replay_s: float, *, expected: bool
) -> None:
    (stage,) = stages_of(pass_ms)
    slow = Straggler(stage=stage, pass_ms=pass_ms, slowdown=slowdown, num_passes=num_passes)
    assert slow.is_worth_leaving(promised_ms, replay_s) is expected
    assert not slow.is_worth_leaving(math.inf, replay_s)


class Drag:
    """A server's failpoints, by which each of its tokens takes `slow_s` longer."""

    def __init__(self) -> None:
        self.slow_s = 0.0

    async def reached(self, phase: str) -> None:
        if phase == "serve/decode":
            await asyncio.sleep(self.slow_s)


@asynccontextmanager
async def dragged(boxes: Any, directory: Path) -> AsyncIterator[tuple[Any, dict[str, Drag]]]:
    """Yield two servers for each half of a model, and the drag of each by its peer id."""
    async with boxes(directory, []) as box:
        drags: dict[str, Drag] = {}
        for start, end in ((0, 3), (0, 3), (3, 6), (3, 6)):
            drag = Drag()
            await box.add(start, end, ServerOptions(kv_bytes=2**20, failpoints=drag))
            drags[list(box.servers)[-1]] = drag
        await box.known(len(drags))
        yield box, drags


async def left(box: Any, drags: Mapping[str, Drag], *slow_hops: int) -> list[tuple[int, str, bool]]:
    """Get an answer during which these hops become slow. Return which hop was left, why, and whether it handed
    over."""
    generation, tokens = box.generate(NUM_TOKENS), []
    async for token in generation:
        tokens.append(token.token_id)
        if len(tokens) == RECENT_PASSES:
            peers = [hop["peer_id"] for hop in generation.trace()["hops"]]
            for index in slow_hops:
                drags[peers[index]].slow_s = SLOW_S
    assert tokens == box.expected(NUM_TOKENS)
    replays = generation.trace()["replays"]
    return [(peers.index(replay["lost_peer"]), replay["reason"], replay["was_handed_over"]) for replay in replays]


@pytest.mark.parametrize("index", [0, 1])
def test_session_moves_away_from_a_server_that_became_slow_and_avoids_it_for_a_while(
    boxes: Any, llama_dir: Path, index: int
) -> None:
    async def scenario() -> None:
        async with dragged(boxes, llama_dir) as (box, drags):
            clock = asyncio.get_running_loop().time
            since_s = clock()
            assert await left(box, drags, index) == [(index, "the server has become slow", True)]
            assert clock() - since_s < NUM_TOKENS * SLOW_S / 2, "the rest of the answer is fast"
            (slow,) = (peer_id for peer_id, drag in drags.items() if drag.slow_s)
            assert slow in box.client._state.health.unproven
            await box.tokens(2)
            assert slow not in {hop["peer_id"] for hop in box.client.trace()["hops"]}
            await asyncio.sleep(SUSPECTED_S)
            assert slow not in box.client._state.health.unproven
            await box.all_freed()

    virtual_time.run(scenario())


def test_session_stays_when_all_servers_are_slow(boxes: Any, llama_dir: Path) -> None:
    """The client or its line may be slow, or one machine that runs them all."""

    async def scenario() -> None:
        async with dragged(boxes, llama_dir) as (box, drags):
            assert await left(box, drags, 0, 1) == []

    virtual_time.run(scenario())


def test_session_stays_when_the_other_servers_are_busy_by_their_newest_records(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with dragged(boxes, llama_dir) as (box, drags):
            look_up = box.membership.servers

            async def busy(model: str) -> dict[str, ServeRecord]:
                records = await look_up(model)
                return {
                    peer_id: replace(record, decode_ms_per_block=10.0, queue_depth=16)
                    for peer_id, record in records.items()
                }

            await box.tokens(1)  # which looks servers up
            with patch.object(box.membership, "servers", AsyncMock(side_effect=busy)) as looked_up:
                assert await left(box, drags, 1) == []
                assert 1 <= looked_up.await_count <= 3, "each search makes the session wait twice as long"

    virtual_time.run(scenario())


def test_sessions_at_one_slow_server_each_move_at_most_once(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with dragged(boxes, llama_dir) as (box, drags):
            generations = [box.generate(NUM_TOKENS) for _ in range(6)]

            async def answer(generation: Any) -> list[int]:
                return [token.token_id async for token in generation]

            answers = asyncio.gather(*map(answer, generations))
            await asyncio.sleep(0)
            slow = list(drags)[2]
            drags[slow].slow_s = SLOW_S
            assert await answers == [box.expected(NUM_TOKENS)] * len(generations)
            replays = [generation.trace()["replays"] for generation in generations]
            assert 1 <= sum(map(len, replays)) <= len(generations)
            assert max(map(len, replays)) == 1
            assert {replay["lost_peer"] for (replay,) in filter(None, replays)} == {slow}

    virtual_time.run(scenario())
