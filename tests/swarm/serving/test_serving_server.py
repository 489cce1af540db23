"""A server's life: which sessions it accepts, what it frees, and how it leaves and moves."""

from __future__ import annotations

import asyncio
import gc
import itertools
import shutil
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.leaks import no_leaks
from support.served_chain import Talk, floats, hidden_rows, sequence_id, token_rows
from swarm.serving.engine import engine
from swarm.serving.engine.span_speed import ObservedSpeed, SpanSpeed
from swarm.serving.model.model_files import open_model
from swarm.serving.server.deployment import Deployment, ServerOptions
from swarm.serving.server.span_announcer import IDLE_S, LOOK_S
from swarm.serving.server.span_server import SpanServer
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection, open_stream
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError, IntegrityError, PeerRefused, PeerUnreachable, SessionError
from swarm_protocol.serving_messages import FILES_METHOD, FilesRequest, FilesResponse
from swarm_protocol.session_frames import OpenSequence, SequenceEnded, ServerLeaving, StepResult

TOKENS = token_rows(5, 6, 7)
HIDDEN = hidden_rows(torch.zeros(2, 32))


@asynccontextmanager
async def talking(box: Any, index: int = 0) -> AsyncIterator[Talk]:
    """Open a connection to a server whose frames the test writes."""
    peer_id = box.who[f"s{index}"]
    server = box.servers[peer_id]
    blank = OpenSequence(
        sequence_id=sequence_id(1),
        session_id="s",
        revision=open_model(box.directory).revision(),
        start=server.start_block,
        end=server.end_block,
        max_tokens=16,
    )
    async with (
        open_stream(box.network, peer_id, "tiny") as stream,
        Talk(MultiplexedConnection(stream, peer_id), blank) as talk,
    ):
        yield talk


@pytest.fixture
def measured_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each measurement of a block a thousand times too long, as when others keep the machine busy."""

    def begin(speed: SpanSpeed) -> ObservedSpeed:
        # not the loaded span's speed, which other tests' servers share
        return ObservedSpeed(replace(speed, decode_ms=1000 * speed.decode_ms, prefill_ms=1000 * speed.prefill_ms))

    monkeypatch.setattr(engine, "ObservedSpeed", begin)


@pytest.mark.usefixtures("measured_under_load")
def test_server_announces_the_observed_speed_when_it_was_measured_under_load(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box:
            [server] = box.servers.values()
            told = server.record
            assert await box.tokens(num_tokens=40) == box.expected(num_tokens=40)
            assert server.record.decode_ms_per_block < told.decode_ms_per_block / 20
            await asyncio.sleep(20)
            [found] = (await box.membership.servers("tiny")).values()
            assert found.decode_ms_per_block < told.decode_ms_per_block / 20, "the observed time must be announced"

    virtual_time.run(scenario())


@pytest.mark.usefixtures("measured_under_load")
def test_idle_server_measures_again_when_it_was_measured_under_load(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box:
            [server] = box.servers.values()
            told = server.record
            await asyncio.sleep(3 * (IDLE_S + LOOK_S))
            [found] = (await box.membership.servers("tiny")).values()
            assert found.decode_ms_per_block < told.decode_ms_per_block / 20
            assert found.prefill_ms_per_token < told.prefill_ms_per_token / 20

    virtual_time.run(scenario())


def test_server_keeps_announcing_when_its_blocks_are_freed_during_a_new_measurement(
    boxes: Any, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same happens when it moves: `Engine.in_thread` refuses waiting work."""

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box:
            await asyncio.sleep(IDLE_S + 2 * LOOK_S)
            measure_again.assert_awaited()
            await box.tokens()
            await asyncio.sleep(LOOK_S)
            [found] = (await box.membership.servers("tiny")).values()
            assert found.tokens_per_s > 0

    measure_again = AsyncMock(side_effect=PeerRefused("the server has stopped computing"))
    monkeypatch.setattr(Deployment, "measure_again", measure_again)
    virtual_time.run(scenario())


def test_server_measures_again_only_after_a_while_without_work(
    boxes: Any, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_s: list[float] = []

    async def measure_again(_: Deployment) -> None:
        measured_s.append(asyncio.get_running_loop().time())

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box:
            for _ in range(int(3 * IDLE_S / 5)):
                await box.tokens(3)
                await asyncio.sleep(5)
            assert not measured_s
            [server] = box.servers.values()
            assert server.record.tokens_per_s > 0, "also when sessions come and go all the time"
            idle_since_s = asyncio.get_running_loop().time()
            await asyncio.sleep(4 * (IDLE_S + LOOK_S))
            assert 2 <= len(measured_s) <= 5
            assert min(after - before for before, after in itertools.pairwise(measured_s)) >= IDLE_S
            assert measured_s[0] - idle_since_s >= IDLE_S - LOOK_S

    monkeypatch.setattr(Deployment, "measure_again", measure_again)
    virtual_time.run(scenario())


def test_sessions_share_the_pages_that_the_budget_allows(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        # 3 blocks, k and v, 2 heads of 8 floats: 384 bytes a token, 16 tokens a page
        async with boxes(llama_dir, [(0, 3)], options=ServerOptions(kv_bytes=384 * 16 * 3 + 100)) as box:
            server = box.servers[box.who["s0"]]
            assert server.deployed.loaded.kv_tokens == server.record.free_kv_tokens == 48
            async with talking(box) as talk:
                await talk.open(1)
                await talk.open(2)
                assert server.record.free_kv_tokens == 16
                error = await talk.refused(3, max_tokens=17)
                assert isinstance(error, PeerRefused)
                assert error.retry_after_s > 0
                await talk.open(3)
                assert (server.record.free_kv_tokens, server.record.queue_depth) == (0, 3)
            await box.all_freed()

    virtual_time.run(scenario())


def test_server_sends_only_whitelisted_files(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            request = FilesRequest(model="tiny").to_bytes()
            data = await box.network.call(box.who["s0"], f"{FILES_METHOD}/tiny", request, timeout_s=9)
            response = FilesResponse.from_bytes(data)
            assert response.files == open_model(llama_dir).small_files()
            assert response.revision == open_model(llama_dir).revision()

    virtual_time.run(scenario())


def test_record_has_measured_times_and_load(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, talking(box) as talk:
            server = box.servers[box.who["s0"]]
            await talk.open()
            await talk.step(TOKENS, 0)
            await asyncio.sleep(10)
            record = (await box.membership.servers("tiny"))[box.who["s0"]]
            assert (record.start, record.end, record.num_blocks, record.state) == (0, 3, 6, "serving")
            assert record.prefill_ms_per_token > 0
            assert record.decode_ms_per_block > 0
            assert record.queue_depth == 1
            assert record.free_kv_tokens == server.deployed.loaded.kv_tokens - 16
            assert server.num_tokens == 3

    virtual_time.run(scenario())


def test_record_has_the_tokens_of_the_last_minute_until_there_are_none(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:

            async def told() -> float:
                return (await box.membership.servers("tiny"))[box.who["s0"]].tokens_per_s

            await asyncio.sleep(60)
            assert await told() == 0.0
            async with talking(box) as talk:
                await talk.open()
                await asyncio.sleep(5)
                await talk.step(TOKENS, 0)
                # only its tokens change from then on, and it is still announced
                await asyncio.sleep(20)
                assert await told() == pytest.approx(3 / 60, rel=0.3)
            await asyncio.sleep(120)
            assert await told() == 0.0

    virtual_time.run(scenario())


def test_closed_server_refuses_and_is_withdrawn(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            server = box.servers[box.who["s0"]]
            async with talking(box) as talk:
                await talk.open(1)
                await server.close()
                await server.close()
                assert "leaving" in str((await talk.next(SequenceEnded)).error(""))
                with pytest.raises(PeerUnreachable):
                    await talk.next(StepResult)
            async with talking(box) as talk:
                assert "no new sessions" in str(await talk.refused())
            request = FilesRequest(model="tiny").to_bytes()
            with pytest.raises(PeerRefused, match="no longer served"):
                await box.network.call(box.who["s0"], f"{FILES_METHOD}/tiny", request, timeout_s=9)
            await asyncio.sleep(1)
            assert (await box.membership.servers("tiny"))[box.who["s0"]].state == "draining"

    with no_leaks():
        virtual_time.run(scenario())


def test_server_that_follows_a_closed_one_on_the_same_network_answers(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as swarm:
            assert await swarm.tokens() == swarm.expected()
            (first,) = swarm.servers.values()
            await first.close()
            again = SpanServer(first._network, first.announcer._membership, llama_dir, name="tiny", start=0, end=6)
            await again.start()
            try:
                async with asyncio.timeout(120):
                    while {each.state for each in (await swarm.membership.servers("tiny")).values()} != {"serving"}:
                        await asyncio.sleep(0.5)
                assert await swarm.tokens() == swarm.expected()
            finally:
                await again.close()

    virtual_time.run(scenario())


@pytest.mark.parametrize("num_turns", range(4))
def test_close_that_is_cancelled_ends_cancelled_and_leaves_no_engine(
    boxes: Any, llama_dir: Path, num_turns: int
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            server = box.servers[box.who["s0"]]
            engine = server.deployed.engine
            closing = asyncio.create_task(server.close())
            for _ in range(num_turns + 1):
                await asyncio.sleep(0)
            assert closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            with pytest.raises(PeerRefused, match="has stopped computing"):
                await engine.in_thread(int)

    virtual_time.run(scenario(), jobs="threads")


def test_dead_engine_ends_sessions_refuses_new_ones_and_is_reported(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            server = box.servers[box.who["s0"]]
            async with talking(box) as working, talking(box) as idle:
                await working.open(1)
                await idle.open(2)
                assert server.failure is None
                working.send_step(TOKENS, 0)
                for talk in (working, idle):
                    assert isinstance((await talk.next(SequenceEnded)).error(""), PeerRefused)
            assert not server.sessions
            assert isinstance(server.failure, SessionError)
            assert str(server.failure).startswith("tiny is served here no more: ArithmeticError: a defect")
            async with talking(box) as talk:
                assert "no new sessions" in str(await talk.refused())
            await asyncio.sleep(1)
            assert (await box.membership.servers("tiny"))[box.who["s0"]].state == "draining"
            await server.drain(within_s=5)
            await server.close()

    defect = patch("swarm.serving.engine.engine.Engine._pass", AsyncMock(side_effect=ArithmeticError("a defect")))
    with no_leaks(), defect:
        virtual_time.run(scenario())


def test_drain_asks_sessions_to_leave_and_ends_those_that_do_not(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with boxes(llama_dir, [(0, 3)]) as box, talking(box) as talk, asyncio.TaskGroup() as tasks:
            server, since_s = box.servers[box.who["s0"]], clock()
            await talk.open(1)
            draining = tasks.create_task(server.drain(within_s=20))
            assert (await talk.next(ServerLeaving)).within_s == 20
            assert "no new sessions" in str(await talk.refused(2))
            await talk.step(TOKENS, 0)  # it continues meanwhile
            assert "leaving" in str((await talk.next(SequenceEnded)).error(""))
            assert 20 <= clock() - since_s < 21
            await draining
            assert not server.sessions

    virtual_time.run(scenario())


def test_start_with_a_damaged_model_names_the_file_and_leaves_nothing(boxes: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with boxes(tmp_path, []) as box:
            with pytest.raises(ConfigError, match=r"no config\.json"):
                await box.add(0, 3)

    with no_leaks():
        virtual_time.run(scenario())


def truncate(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-100])


def corrupt(shard: Path) -> None:
    shard.write_bytes(b"\xff" * 64)


def lose_a_tensor(shard: Path) -> None:
    tensors = load_file(shard)
    tensors.popitem()
    save_file(tensors, shard)


@pytest.mark.parametrize("damage", [truncate, corrupt, lose_a_tensor])
def test_start_of_a_damaged_shard_names_it_leaves_nothing_and_others_answer(
    boxes: Any, llama_dir: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damaged = shutil.copytree(llama_dir, tmp_path / "damaged")
    shard = min(damaged.glob("model*.safetensors"))
    damage(shard)

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box:
            box.directory = damaged
            with pytest.raises(IntegrityError, match=shard.name):
                await box.add(0, 6)
            box.directory = llama_dir
            assert await box.tokens() == box.expected()
            await box.all_freed()

    with no_leaks():
        virtual_time.run(scenario())


def test_start_that_cannot_serve_its_methods_leaves_nothing(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            server = box.servers[box.who["s0"]]
            with pytest.raises(ValueError, match="served"):
                await server.start()

    with no_leaks():
        virtual_time.run(scenario())


def test_next_start_can_serve_the_methods_when_one_failed_between_them(boxes: Any, llama_dir: Path) -> None:
    """The libp2p daemon may be unreachable for a moment."""

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            server = box.servers[box.who["s0"]]
            await server.close()
            network, membership = server._network, server.announcer._membership
            with (
                patch.object(network, "serve_stream", AsyncMock(side_effect=PeerUnreachable("no daemon"))),
                pytest.raises(PeerUnreachable, match="no daemon"),
            ):
                await SpanServer(network, membership, llama_dir, name="tiny", start=0, end=3).start()
            another = SpanServer(network, membership, llama_dir, name="tiny", start=0, end=3)
            await another.start()
            await another.close()

    with no_leaks():
        virtual_time.run(scenario())


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


def test_move_serves_the_new_span_before_the_old_one_ends_and_then_gives_its_memory_back(
    boxes: Any, llama_dir: Path
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, talking(box) as old:
            server = box.servers[box.who["s0"]]
            pool = weakref.ref(server.deployed.engine.pool)
            await old.open(1)
            assert await server.move(3, 6, options=ServerOptions(), still_wanted=yes, within_s=20)
            assert (server.record.start, server.record.end) == (3, 6)
            assert (await old.next(ServerLeaving)).within_s == 20
            await old.step(TOKENS, 0)  # the old session continues
            async with talking(box) as new:
                await new.open(2)
                assert floats((await new.step(HIDDEN, 0, 2, want="last")).rows).shape == (1, 256)
                assert "leaving" in str((await old.next(SequenceEnded)).error(""))
                await asyncio.sleep(1)
                assert len(server.sessions) == 1
                assert _is_freed(pool)
                await new.step(HIDDEN, 2, 2)
                assert server.num_tokens == 7

    virtual_time.run(scenario())


def _is_freed(found: weakref.ref[object]) -> bool:
    """Return whether nothing refers to it any more.

    A thread that has returned a result may keep its job a moment longer.
    """
    until = time.monotonic() + 10
    while found() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    return found() is None


def test_move_again_and_close_while_the_old_spans_are_still_leaving(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, talking(box) as talk:
            server = box.servers[box.who["s0"]]
            for number, (start, end) in enumerate([(2, 5), (3, 6)]):
                await talk.open(number, start=server.start_block, end=server.end_block)
                assert await server.move(start, end, options=ServerOptions(), still_wanted=yes, within_s=100)
                await talk.next(ServerLeaving)
            await server.close()
            assert not server.sessions

    with no_leaks():
        virtual_time.run(scenario())


@pytest.mark.parametrize("when", ["loading", "asking"])
def test_old_span_stays_served_when_a_move_is_cancelled_or_fails(boxes: Any, llama_dir: Path, when: str) -> None:
    async def fail() -> bool:
        raise IntegrityError("no such thing")

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, talking(box) as talk:
            server = box.servers[box.who["s0"]]
            blocks = (3, 6) if when == "asking" else (3, 9)
            with pytest.raises(IntegrityError if when == "asking" else ConfigError):
                await server.move(*blocks, options=ServerOptions(), still_wanted=fail, within_s=20)
            await talk.open()
            await talk.step(TOKENS, 0)
            assert (server.start_block, server.end_block) == (0, 3)

    with no_leaks():
        virtual_time.run(scenario())


def test_leave_and_move_frees_the_old_span_before_it_loads_the_new_one(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, talking(box) as talk:
            server = box.servers[box.who["s0"]]
            pool = weakref.ref(server.deployed.engine.pool)
            held = []

            async def load(*arguments: Any) -> Deployment:
                until = time.monotonic() + 2  # the thread that computed last may still be about to release it
                while pool() is not None and time.monotonic() < until:
                    gc.collect()
                    time.sleep(0.01)
                held.append(pool())
                return await loading(*arguments)

            await talk.open()
            loading = Deployment.load
            with patch.object(Deployment, "load", load):
                await server.leave_and_move(3, 6, options=ServerOptions(), within_s=5)
            assert held == [None]
            await talk.next(ServerLeaving)
            await talk.next(SequenceEnded)
            await talk.open(2, start=3, end=6)
            assert server.record.state == "serving"

    virtual_time.run(scenario())


def test_leave_and_move_counts_the_old_span_s_tokens_while_it_is_stopped(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, talking(box) as talk:
            server = box.servers[box.who["s0"]]
            await talk.open()
            await talk.step(TOKENS, 0)
            counted = [server.num_tokens]
            close = Deployment.close

            async def count(deployed: Deployment) -> None:
                counted.append(server.num_tokens)
                await close(deployed)

            with patch.object(Deployment, "close", count):
                await server.leave_and_move(3, 6, options=ServerOptions(), within_s=5)
            assert counted == [TOKENS.num_rows] * 2
            assert server.num_tokens == TOKENS.num_rows

    virtual_time.run(scenario())


def test_leave_and_move_serves_the_old_span_again_when_the_new_one_cannot_be_loaded(
    boxes: Any, llama_dir: Path
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, talking(box) as talk:
            server = box.servers[box.who["s0"]]
            with pytest.raises(ConfigError):
                await server.leave_and_move(3, 9, options=ServerOptions(), within_s=5)
            assert (server.record.start, server.record.end, server.record.state) == (0, 3, "serving")
            await talk.open()
            await talk.step(TOKENS, 0)

    virtual_time.run(scenario())


def test_leave_and_move_fails_when_neither_span_can_be_loaded(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            server = box.servers[box.who["s0"]]
            loads = AsyncMock(side_effect=[IntegrityError("a shard is damaged"), MemoryError("others took it")])
            with patch.object(Deployment, "load", loads), pytest.raises(MemoryError):
                await server.leave_and_move(3, 6, options=ServerOptions(), within_s=5)
            assert "tiny is served here no more: MemoryError: others took it" in str(server.failure)
            await asyncio.sleep(1)
            assert (await box.membership.servers("tiny"))[box.who["s0"]].state == "draining"

    with no_leaks():
        virtual_time.run(scenario())


def test_move_no_longer_wanted_changes_nothing(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            server = box.servers[box.who["s0"]]

            assert not await server.move(3, 6, options=ServerOptions(), still_wanted=no, within_s=20)
            assert (server.start_block, server.end_block) == (0, 3)

    virtual_time.run(scenario())


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int3"},
        {"kv_bytes": 0},
        {"max_sessions": 0},
        {"idle_s": 0},
        {"max_step_tokens": 10**6},
        {"max_connections": 0},
    ],
)
def test_invalid_server_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerOptions(**options)


def test_cache_budget_below_one_page_is_refused_by_name(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, []) as box:
            with pytest.raises(ConfigError, match="16 tokens take 6144 bytes of cache, and 6143 are allowed"):
                await box.add(0, 3, ServerOptions(kv_bytes=6143))

    virtual_time.run(scenario())
