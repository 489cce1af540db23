"""A server's life: whom it lets in, what it gives back, how it leaves and moves."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
import torch
from raw_session import HIDDEN, SESSION, TOKENS, ask, opening, session
from swarm.network.interface import EndOfStream
from swarm.serving.model_files import open_model
from swarm.serving.server import OPEN_S
from swarm.serving.server_options import ServerOptions
from swarm.serving.tensors import pack
from swarm.testing import virtual_time
from swarm.testing.leaks import no_leaks
from swarm_protocol.errors import (
    ConfigError,
    PeerRefused,
    PeerTimeout,
    PeerViolation,
    SessionError,
)
from swarm_protocol.serving_messages import (
    FILES_METHOD,
    FilesRequest,
    FilesResponse,
    Step,
)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x01\xff\xff", b"\x02abc", b"x" * 5000], ids=len)
def test_open_garbage_is_a_violation(boxes: Any, llama_dir: Path, data: bytes) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            async with box.network.stream(box.who["s0"], SESSION, timeout_s=60) as stream:
                await stream.send(data)
                with pytest.raises(PeerViolation):
                    await stream.receive()
            await box.all_freed()

    virtual_time.run(scenario())


BAD_OPENINGS = {
    "revision": ({"revision": "other"}, "this server has revision"),
    "blocks": ({"start": 2, "end": 5}, r"this server has blocks \[0, 3\)"),
    "never fits": ({"max_tokens": 2**20}, "is over this server's"),
}


@pytest.mark.parametrize("case", BAD_OPENINGS)
def test_open_what_is_not_served_is_refused_for_good(boxes: Any, llama_dir: Path, case: str) -> None:
    changes, message = BAD_OPENINGS[case]

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)], options=ServerOptions(kv_bytes=2**20)) as box:
            with pytest.raises(PeerRefused, match=message) as caught:
                async with session(box, **changes):
                    pass
            assert caught.value.retry_after_s == 0

    virtual_time.run(scenario())


def test_open_over_the_cache_budget_is_refused_until_room_is_given_back(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        # 3 blocks, k and v, 2 heads of 8 floats: 384 bytes a token
        async with boxes(llama_dir, [(0, 3)], options=ServerOptions(kv_bytes=384 * 40)) as box:
            server = box.servers[box.who["s0"]]
            assert server.record.free_kv_tokens == 40
            async with session(box), session(box):
                assert server.record.free_kv_tokens == 8
                with pytest.raises(PeerRefused, match="room for 8 more tokens and is asked for 16") as caught:
                    async with session(box):
                        pass
                assert caught.value.retry_after_s > 0
                async with session(box, max_tokens=8):
                    assert server.record.free_kv_tokens == 0
            await box.all_freed()
            async with session(box, max_tokens=40):
                pass

    virtual_time.run(scenario())


def test_open_beyond_max_sessions_is_refused(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)], options=ServerOptions(max_sessions=1)) as box, session(box):
            with pytest.raises(PeerRefused):
                async with session(box):
                    pass

    virtual_time.run(scenario())


def test_open_by_one_peer_beyond_half_is_refused_while_another_is_there(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)], options=ServerOptions(max_sessions=4)) as box:
            async with box.internet.network().stream(box.who["s0"], SESSION, timeout_s=60) as other:
                await other.send(opening(box).to_bytes())
                await other.receive()
                async with session(box), session(box):
                    with pytest.raises(PeerRefused, match="2 sessions of yours") as caught:
                        async with session(box):
                            pass
                    assert caught.value.retry_after_s > 0
            await box.all_freed()
            async with session(box), session(box), session(box), session(box):
                pass

    virtual_time.run(scenario())


def test_session_that_ends_frees_its_cache_memory(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            server = box.servers[box.who["s0"]]
            async with session(box) as stream:
                await ask(stream, TOKENS)
                held = weakref.ref(next(iter(server.sessions)).cache.entries.layers[0].keys)
                assert held() is not None
            await box.all_freed()
            gc.collect()
            assert held() is None

    virtual_time.run(scenario())


def test_silent_connections_are_ended_and_leave_nothing(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            clock = asyncio.get_running_loop().time
            since_s = clock()

            async def say_nothing() -> None:
                async with box.network.stream(box.who["s0"], SESSION, timeout_s=600) as stream:
                    with pytest.raises(PeerTimeout):
                        await stream.receive()

            async with asyncio.TaskGroup() as tasks:
                for _ in range(200):
                    tasks.create_task(say_nothing())
            assert clock() - since_s <= OPEN_S + 1
            assert not box.servers[box.who["s0"]].sessions

    virtual_time.run(scenario())


def test_session_that_falls_silent_is_ended_and_told_so(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)], options=ServerOptions(idle_s=7)) as box, session(box) as stream:
            await ask(stream, TOKENS)
            with pytest.raises(PeerRefused, match="silent for 7 s"):
                await stream.receive()
            await box.all_freed()

    virtual_time.run(scenario())


def test_client_that_stops_reading_is_ended(boxes: Any, llama_dir: Path) -> None:
    """It asks again and again for large answers and takes none, so that the stream's window fills up."""

    async def scenario() -> None:
        options = ServerOptions(idle_s=7)
        async with boxes(llama_dir, [(0, 6)], options=options) as box, session(box, max_tokens=2**15) as stream:
            x = pack(torch.zeros(512, dtype=torch.int64))
            for position in range(0, 2**15, 512):
                await stream.send(Step(position=position, want="all", tensor=x).to_bytes())
            await box.all_freed()
            assert 0 < box.servers[box.who["s0"]].engine.num_done < 64

    virtual_time.run(scenario())


def test_client_that_leaves_in_the_middle_of_a_step_frees_the_session(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            async with session(box) as stream:
                await stream.send(Step(position=0, want="all", tensor=pack(TOKENS)).to_bytes())
            await box.all_freed()

    virtual_time.run(scenario())


def test_finished_client_ends_the_session(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, session(box) as stream:
            await stream.finish()
            with pytest.raises(EndOfStream):
                await stream.receive()
            await box.all_freed()

    virtual_time.run(scenario())


def test_files_are_the_whitelisted_ones(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            request = FilesRequest(model="tiny").to_bytes()
            data = await box.network.call(box.who["s0"], f"{FILES_METHOD}/tiny", request, timeout_s=9)
            response = FilesResponse.from_bytes(data)
            assert response.files == open_model(llama_dir).small_files()
            assert response.revision == open_model(llama_dir).revision()

    virtual_time.run(scenario())


def test_record_tells_measured_times_and_load(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, session(box):
            await asyncio.sleep(10)
            record = (await box.membership.servers("tiny"))[box.who["s0"]]
            assert (record.start, record.end, record.num_blocks, record.state) == (0, 3, 6, "serving")
            assert record.prefill_ms_per_token > 0
            assert record.decode_ms_per_block > 0
            assert record.queue_depth == 1
            assert record.free_kv_tokens == box.servers[box.who["s0"]].max_kv_tokens - 16

    virtual_time.run(scenario())


def test_closed_server_refuses_and_is_withdrawn(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            server = box.servers[box.who["s0"]]
            wanted = opening(box)
            await server.close()
            await server.close()
            async with box.network.stream(box.who["s0"], SESSION, timeout_s=9) as stream:
                await stream.send(wanted.to_bytes())
                with pytest.raises(PeerRefused, match="no new sessions"):
                    await stream.receive()
            request = FilesRequest(model="tiny").to_bytes()
            with pytest.raises(PeerRefused, match="no longer served"):
                await box.network.call(box.who["s0"], f"{FILES_METHOD}/tiny", request, timeout_s=9)
            await asyncio.sleep(1)
            assert (await box.membership.servers("tiny"))[box.who["s0"]].state == "draining"

    with no_leaks():
        virtual_time.run(scenario())


@pytest.mark.parametrize("num_turns", range(4))
def test_close_that_is_cancelled_ends_cancelled_and_leaves_no_engine(
    boxes: Any, llama_dir: Path, num_turns: int
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            server = box.servers[box.who["s0"]]
            closing = asyncio.create_task(server.close())
            for _ in range(num_turns + 1):
                await asyncio.sleep(0)
            assert closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            with pytest.raises(RuntimeError, match="shutdown"):
                server.engine.thread.submit(int)

    virtual_time.run(scenario())


def test_engine_that_dies_ends_sessions_refuses_new_ones_and_is_told(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, session(box) as working, session(box) as idle:
            server = box.servers[box.who["s0"]]
            assert server.failure is None
            for reading in (ask(working, TOKENS), idle.receive()):
                with pytest.raises(PeerRefused, match="leaving"):
                    async with asyncio.timeout(5):
                        await reading
            await box.all_freed()
            assert isinstance(server.failure, SessionError)
            assert str(server.failure).startswith("tiny is served here no more: ArithmeticError: a defect")
            with pytest.raises(PeerRefused, match="no new sessions"):
                async with session(box):
                    pass
            await asyncio.sleep(1)
            assert (await box.membership.servers("tiny"))[box.who["s0"]].state == "draining"
            await server.drain(within_s=5)
            await server.close()

    defect = patch("swarm.serving.engine.Engine._run_one", AsyncMock(side_effect=ArithmeticError("a defect")))
    with no_leaks(), defect:
        virtual_time.run(scenario())


def test_start_of_a_damaged_model_fails_by_name_and_leaves_nothing(boxes: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with boxes(tmp_path, []) as box:
            with pytest.raises(ConfigError, match=r"no config\.json"):
                await box.add(0, 3)

    with no_leaks():
        virtual_time.run(scenario())


def test_move_serves_the_new_span_before_the_old_one_ends(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box, session(box) as stream:
            server = box.servers[box.who["s0"]]

            async def yes() -> bool:
                return True

            assert await server.move(3, 6, still_wanted=yes, within_s=20)
            result = await ask(stream, TOKENS)  # the old session goes on
            assert result.leave_within_s == pytest.approx(20, abs=1)
            async with session(box) as new:
                assert (await ask(new, HIDDEN, want="last")).tensor is not None
            with pytest.raises(PeerRefused, match="leaving"):
                await stream.receive()

    virtual_time.run(scenario())


def test_move_no_longer_wanted_changes_nothing(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as box:
            server = box.servers[box.who["s0"]]

            async def no() -> bool:
                return False

            assert not await server.move(3, 6, still_wanted=no, within_s=20)
            assert (server.start_block, server.end_block) == (0, 3)

    virtual_time.run(scenario())


@pytest.mark.parametrize(
    "options", [{"dtype": "int3"}, {"kv_bytes": 0}, {"max_sessions": 0}, {"idle_s": 0}, {"max_step_tokens": 10**6}]
)
def test_options_without_meaning_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerOptions(**options)


def test_cache_budget_below_one_token_is_refused_by_name(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, []) as box:
            with pytest.raises(ConfigError, match="a token takes 384 bytes of cache, and 383 are allowed"):
                await box.add(0, 3, ServerOptions(kv_bytes=383))

    virtual_time.run(scenario())
