"""Failures of servers in the middle of an answer: the tokens must be those of one undisturbed machine.

Faults are injected at servers of the chain. A prompt is one prefill, so the n-th prefill is at the n-th hop, and with
three hops the n-th decode is at hop (n - 1) mod 3.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, patch

import pytest
from support.faults import Fault
from swarm.router.routing import NoChain
from swarm.serving.session.client_state import SessionOptions
from swarm.serving.session.connection_pool import IDLE_S, ConnectionPool
from swarm.serving.session.repair import MAX_FAILURES
from swarm.serving.session.route_finder import MAX_LEFT_EARLY
from swarm.serving.session.session_state import LEAVE_RETRY_S
from swarm.serving.session.silence import ANSWER_S, QUIET_S
from swarm.serving.session.stage_connections import AGAIN_S, DIAL_S
from swarm.serving.session.step_timer import FLOOR_S
from swarm.testing import virtual_time
from swarm_protocol.errors import SessionError
from swarm_protocol.session_frames import Frame, SampledToken, StepResult

THIRDS = [(0, 2), (0, 2), (2, 4), (2, 4), (4, 6), (4, 6)]

PHASES = {
    "prefill of first": ("serve/prefill", 1),
    "prefill of middle": ("serve/prefill", 2),
    "prefill of last": ("serve/prefill", 3),
    "decode on first": ("serve/decode", 13),
    "decode on middle": ("serve/decode", 14),
    "decode on last": ("serve/decode", 15),
    "reply to prefill": ("serve/reply", 2),
    "reply to token": ("serve/reply", 12),
}


def slow_step(function: Callable[..., object]) -> float:
    """Make each step take so many seconds that a fault can happen during a token."""
    return 0.2


@pytest.mark.parametrize("what", ["kill", "stall", "raise"])
@pytest.mark.parametrize("phase", PHASES)
def test_failover_costs_a_pause_and_no_token_when_one_server_is_lost(
    boxes: Any, llama_dir: Path, phase: str, what: Any
) -> None:
    where, nth = PHASES[phase]
    faults = [Fault(who="*", phase=where, what=what, nth=nth)]

    async def scenario() -> None:
        async with boxes(llama_dir, THIRDS, faults=faults) as box:
            generation = box.generate()
            tokens = [token.token_id async for token in generation]
            assert tokens == box.expected()
            (replay,) = generation.trace()["replays"]
            assert len(replay["new_peers"]) == 1
            # a broken connection is noticed at once, and a silent server after the least timeout
            assert replay["failover_ms"] <= (1000 * (FLOOR_S + 1) if what == "stall" else 10)
            await box.all_freed()

    virtual_time.run(scenario())


@pytest.mark.parametrize("index", [0, 1, 2])
def test_trace_of_a_token_leaves_out_the_time_of_a_failover(boxes: Any, llama_dir: Path, index: int) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, THIRDS) as box:
            undisturbed = box.generate()
            assert [token.token_id async for token in undisturbed] == box.expected()
            token_ms = sum(hop["ms_per_step"] for hop in undisturbed.trace()["hops"])
            assert token_ms >= 3 * 200 - 1e-6, "three servers take 200 ms each"

            generation, tokens = box.generate(), []
            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    box.internet.crash(generation.trace()["hops"][index]["peer_id"])
            assert tokens == box.expected()
            trace = generation.trace()
            (replay,) = trace["replays"]
            assert [hop["peer_id"] for hop in trace["hops"] if hop["is_replaced"]] == [replay["lost_peer"]]
            chain = sorted((hop for hop in trace["hops"] if not hop["is_replaced"]), key=lambda hop: hop["start"])
            assert [(hop["start"], hop["end"]) for hop in chain] == THIRDS[::2]
            assert sum(hop["ms_per_step"] for hop in chain) == pytest.approx(token_ms, rel=0.1)
            assert replay["failover_ms"] > 200
            assert [hop["prompt_ms"] > 0 for hop in chain] == [i != index for i in range(3)], (
                "the replacement must have run the prompt again, and the others must not"
            )

    virtual_time.run(scenario(), compute_s=slow_step)


@pytest.mark.parametrize("prompt_faults", [1, 2])
def test_failover_gives_the_same_tokens_while_a_long_prompt_is_prefilled(
    boxes: Any, llama_dir: Path, prompt_faults: int
) -> None:
    faults = [Fault(who="*", phase="serve/prefill", what="kill", nth=nth) for nth in (5, 8)[:prompt_faults]]

    async def scenario() -> None:
        options = SessionOptions(max_step_tokens=4)
        async with boxes(llama_dir, THIRDS, faults=faults, session=options) as box:
            assert await box.tokens() == box.expected()
            assert len(box.client.trace()["replays"]) == prompt_faults

    virtual_time.run(scenario())


def test_failover_replaces_two_servers_that_die_at_once(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, THIRDS) as box:
            generation = box.generate()
            tokens = []
            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    for hop in generation.trace()["hops"][1:]:
                        box.internet.crash(hop["peer_id"])
            assert tokens == box.expected()
            assert len(generation.trace()["replays"]) == 2

    virtual_time.run(scenario(), compute_s=slow_step)


def test_failover_replaces_a_replacement_that_dies(boxes: Any, llama_dir: Path) -> None:
    """It dies at its first step, the replay: the middle hop's decode of the 15th token, and then a prefill."""
    faults = [
        Fault(who="*", phase="serve/decode", what="kill", nth=14),
        Fault(who="*", phase="serve/prefill", what="kill", nth=4),
    ]

    async def scenario() -> None:
        async with boxes(llama_dir, [*THIRDS, (2, 4)], faults=faults) as box:
            assert await box.tokens() == box.expected()
            assert len(box.client.trace()["replays"]) == 2

    virtual_time.run(scenario())


def test_failover_replaces_one_span_by_parts_of_several_servers(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 1), (1, 5), (5, 6)]) as box:
            generation = box.generate()
            tokens = []
            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    await box.add(0, 3)
                    await box.add(2, 6)
                    await box.known(5)
                    box.internet.crash(box.who["s1"])
            assert tokens == box.expected()
            (replay,) = generation.trace()["replays"]
            assert replay["new_peers"] == (box.who["s3"], box.who["s4"])
            assert (replay["start"], replay["end"]) == (1, 5)

    virtual_time.run(scenario(), compute_s=slow_step)


def test_failover_finds_a_spare_that_joins_while_the_client_waits(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6)]) as box, asyncio.TaskGroup() as tasks:
            generation = box.generate()
            tokens = []

            async def rescue() -> None:
                await asyncio.sleep(5)
                await box.add(3, 6)

            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    box.internet.crash(box.who["s1"])
                    tasks.create_task(rescue())
            assert tokens == box.expected()
            assert 4000 < generation.trace()["failover_ms"] < 8000

    virtual_time.run(scenario(), compute_s=slow_step)


def test_failover_without_a_spare_names_the_missing_blocks_in_bounded_time(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 4), (4, 6)]) as box:
            generation = box.generate()
            clock = asyncio.get_running_loop().time
            for _ in range(3):
                await anext(aiter(generation))
            box.internet.crash(box.who["s1"])
            since_s = clock()
            waited = (
                r"blocks 4:6 are not available: their servers just failed \(\w+: the peer does not answer\), "
                r"and no other server took over within 2[01] s"
            )
            with pytest.raises(NoChain, match=waited) as caught:
                await anext(aiter(generation))
            assert isinstance(caught.value, SessionError)
            assert caught.value.missing == ((4, 6),)
            assert clock() - since_s < SessionOptions().patience_s + 2
            await box.all_freed()

    virtual_time.run(scenario(), compute_s=slow_step)


def test_failover_uses_a_stalled_server_again_when_it_is_the_only_one(boxes: Any, llama_dir: Path) -> None:
    faults = [Fault(who="s1", phase="serve/decode", what="stall", nth=3)]

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6)], faults=faults) as box:
            assert await box.tokens() == box.expected()
            (replay,) = box.client.trace()["replays"]
            assert replay["new_peers"] == (replay["lost_peer"],)

    virtual_time.run(scenario())


def test_failover_gives_up_when_a_step_breaks_every_server(boxes: Any, llama_dir: Path) -> None:
    """Each server takes the session over, replays, and fails at the same token.

    Without a bound this would never end.
    """
    faults = [Fault(who="*", phase="serve/decode", what="raise", nth=3)]
    faults += [Fault(who="*", phase="serve/prefill", what="raise", nth=nth) for nth in range(2, MAX_FAILURES + 2)]

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] * 3, faults=faults, session=SessionOptions(patience_s=600)) as box:
            with pytest.raises(SessionError, match=r"servers keep failing at the same token: .* \(blocks 0:6\)"):
                await box.tokens()
            await box.all_freed()

    virtual_time.run(scenario())


def test_opening_fails_in_bounded_time_when_servers_never_answer(boxes: Any, llama_dir: Path) -> None:
    """Trying all of them takes longer than any of them is avoided, so there is always one more to try."""

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] * 9, detection_s=1e6) as box:
            await box.kit()
            box.internet.partition([[box.network.peer_id]])
            servers = await box.membership.servers("tiny")
            with (
                patch.object(box.membership, "servers", AsyncMock(return_value=servers)),
                pytest.raises(SessionError, match="opened no session"),
            ):
                async with asyncio.timeout(1000):
                    await box.tokens()
            box.internet.heal()

    virtual_time.run(scenario())


def lying(send: Callable[[Frame], None]) -> Callable[[Frame], None]:
    """Send results with a token that is outside the vocabulary."""

    def lie(frame: Frame) -> None:
        send(dataclasses.replace(frame, token=SampledToken(token_id=10**6)) if isinstance(frame, StepResult) else frame)

    return lie


def test_failover_does_not_use_a_server_again_when_it_sent_invalid_results(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6), (3, 6)]) as box:
            generation = box.generate()
            tokens = []
            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    liar = generation.trace()["hops"][1]["peer_id"]
                    (served,) = box.servers[liar].sessions
                    served.connection.send = lying(served.connection.send)  # type: ignore[method-assign]
            assert tokens == box.expected()
            reasons = {replay["lost_peer"]: replay["reason"] for replay in generation.trace()["replays"]}
            assert "outside the vocabulary" in reasons.pop(liar)
            # the first server had its bad token, too
            assert all("a token that only others had got" in reason for reason in reasons.values())
            for _ in range(5):
                await box.tokens(2)
                assert liar not in {hop["peer_id"] for hop in box.client.trace()["hops"]}

    virtual_time.run(scenario(), compute_s=slow_step)


def test_drain_moves_sessions_away_before_the_server_ends_them(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6), (3, 6)]) as box, asyncio.TaskGroup() as tasks:
            generation = box.generate()
            tokens = []
            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    leaver = generation.trace()["hops"][1]["peer_id"]
                    draining = tasks.create_task(box.servers[leaver].drain(within_s=30))
                    await asyncio.sleep(0)
            assert tokens == box.expected()
            await draining
            (replay,) = generation.trace()["replays"]
            assert replay["lost_peer"] == leaver
            assert replay["failover_ms"] < 1
            assert box.servers[leaver].record.state == "draining"

    virtual_time.run(scenario())


def test_drain_lets_a_session_finish_in_time_when_there_is_no_other_server(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box, asyncio.TaskGroup() as tasks:
            server = box.servers[box.who["s0"]]
            tokens = []
            async for token in box.generate():
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    draining = tasks.create_task(server.drain(within_s=30))
                    await asyncio.sleep(0)
            assert tokens == box.expected()
            await draining
            assert not server.sessions
            with pytest.raises(NoChain):
                await box.tokens(2)

    virtual_time.run(scenario(), compute_s=slow_step)


def test_drain_looks_for_a_spare_now_and_then_and_not_with_each_token(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box, asyncio.TaskGroup() as tasks:
            server = box.servers[box.who["s0"]]
            generation = box.generate(60)
            assert await anext(aiter(generation))
            tasks.create_task(server.drain(within_s=30))
            await asyncio.sleep(0)
            looked_up = patch.object(box.membership, "servers", AsyncMock(side_effect=box.membership.servers))
            since_s = asyncio.get_running_loop().time()
            with looked_up as look_up:
                async for _ in generation:
                    pass
            seconds = asyncio.get_running_loop().time() - since_s
            assert 2 <= look_up.await_count <= 2 + seconds / LEAVE_RETRY_S

    virtual_time.run(scenario(), compute_s=lambda function: 0.2)


def test_drain_ends_a_session_that_stays_too_long_with_a_refusal(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        options = SessionOptions(patience_s=3)
        async with boxes(llama_dir, [(0, 6)], session=options) as box:
            server = box.servers[box.who["s0"]]
            clock = asyncio.get_running_loop().time
            generation = box.generate(60)
            assert await anext(aiter(generation))
            since_s = clock()
            await server.drain(within_s=5)
            assert 5 <= clock() - since_s < 6
            assert not server.sessions
            with pytest.raises(NoChain, match="nobody serves them"):
                async for _ in generation:
                    pass

    virtual_time.run(scenario(), compute_s=slow_step)


def test_violation_by_the_client_is_named_and_not_retried(boxes: Any, llama_dir: Path) -> None:
    """The client has a defect: every server refuses, and the session must end instead of trying for ever."""

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6), (0, 6)], session=SessionOptions(patience_s=2)) as box:
            kit = await box.kit()
            object.__setattr__(kit.shape, "vocab_size", 300)
            with pytest.raises(SessionError, match="outside this model's vocabulary"):
                await box.tokens(2, prompt=[299])
            await box.all_freed()

    virtual_time.run(scenario())


def test_first_request_to_a_server_that_is_gone_soon_asks_another(boxes: Any, llama_dir: Path) -> None:
    """It has left without a word, and its record is listed for a while."""

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] * 2, detection_s=1e6) as box:
            clock = asyncio.get_running_loop().time
            for _ in range(4):
                box.client._state.health.opened(box.who["s1"])  # so that s0 is asked first
            assert await box.tokens() == box.expected()
            await asyncio.sleep(2 * IDLE_S)  # its connection is closed
            box.internet.partition([[box.who["s0"]]])
            since_s = clock()
            assert await box.tokens() == box.expected()
            assert clock() - since_s < DIAL_S + 1

    virtual_time.run(scenario())


def test_server_is_not_left_for_a_dial_during_which_this_process_was_stopped(boxes: Any, llama_dir: Path) -> None:
    keep_open = ConnectionPool._keep_open

    async def dialled_late(pool: ConnectionPool, *arguments: Any) -> None:
        await asyncio.sleep(0.1)
        cast(Any, asyncio.get_running_loop())._now_s += 2 * DIAL_S
        await asyncio.sleep(0.1)
        await keep_open(pool, *arguments)

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] * 2) as box:
            assert await box.tokens() == box.expected()
            assert not box.client._state.health.avoid

    with patch.object(ConnectionPool, "_keep_open", dialled_late):
        virtual_time.run(scenario())


def test_session_whose_servers_are_all_slow_to_dial_leaves_two_and_waits_for_the_third(
    boxes: Any, llama_dir: Path
) -> None:
    keep_open, dial_s = ConnectionPool._keep_open, 1.5 * DIAL_S

    async def dialled_late(pool: ConnectionPool, *arguments: Any) -> None:
        await asyncio.sleep(dial_s)
        await keep_open(pool, *arguments)

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] * 8) as box:
            clock = asyncio.get_running_loop().time
            since_s = clock()
            assert await box.tokens() == box.expected()
            assert clock() - since_s < MAX_LEFT_EARLY * DIAL_S + dial_s + 1
            assert len(box.client._state.health.avoid) == MAX_LEFT_EARLY

    with patch.object(ConnectionPool, "_keep_open", dialled_late):
        virtual_time.run(scenario())


def test_failover_takes_seconds_when_all_servers_of_a_chain_fall_silent_at_once(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6)] * 2, detection_s=1e6) as box:
            clock, tokens, silent_s, pause_s = asyncio.get_running_loop().time, list[int](), 0.0, 0.0
            generation = box.generate()
            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    box.internet.partition([[hop["peer_id"] for hop in generation.trace()["hops"]]])
                    silent_s = clock()
                if len(tokens) == 6:
                    pause_s = clock() - silent_s
            assert tokens == box.expected()
            assert QUIET_S + ANSWER_S < pause_s < QUIET_S + ANSWER_S + AGAIN_S + 1
            assert len(generation.trace()["replays"]) == 2

    virtual_time.run(scenario(), compute_s=lambda _: 0.1)


def test_failover_leaves_no_server_when_the_client_itself_is_cut_off_for_seconds(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6)] * 2, detection_s=1e6) as box:
            tokens = list[int]()
            generation = box.generate()
            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    box.internet.partition([[box.network.peer_id]])
                    asyncio.get_running_loop().call_later(QUIET_S + ANSWER_S + AGAIN_S + 0.5, box.internet.heal)
            assert tokens == box.expected()
            assert not generation.trace()["replays"]

    virtual_time.run(scenario(), compute_s=lambda _: 0.1)
