"""Calls on blocks while other servers lie or are busy, and beside other clients' sessions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from swarm.client import remote_blocks
from swarm.client.remote_blocks import PATIENCE_S
from swarm.client.request import ContextExceeded
from swarm.network.interface import Stream
from swarm.network.membership import Membership
from swarm.serving.peer_shares import Sharer, byte_limits
from swarm.serving.server import forward_server
from swarm.serving.server.forward_call import MAX_PIECE_MS, PIECE_MS, ForwardPace
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError, PeerRefused, PeerUnreachable, SessionError, SwarmError
from swarm_protocol.rows import Rows
from swarm_protocol.serving_messages import TensorPiece

TOKENS = torch.tensor([[5, 80, 33, 21, 90, 7, 7, 12, 60, 61, 3, 140], [9, 8, 7, 6, 5, 4, 3, 2, 200, 201, 202, 203]])


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Rows(codec="raw", num_rows=24, num_columns=32, payload=b"\x00\x00\xc0\x7f" * 24 * 32), "finite"),
        (Rows(codec="raw", num_rows=25, num_columns=32, payload=bytes(4 * 25 * 32)), "25 rows"),
        (Rows(codec="tokens", num_rows=24, num_columns=0, payload=bytes(4 * 24)), "0 columns"),
        (ConfigError("buy a new client"), "new client"),
        (PeerRefused("not you"), "not you"),
        (None, "ended the call"),
    ],
    ids=["nan", "rows", "tokens", "blame", "refusal", "silence"],
)
def test_call_uses_another_server_when_one_returns_invalid_results(
    boxes: Any, llama_dir: Path, caplog: pytest.LogCaptureFixture, answer: Any, error: str
) -> None:
    async def lie(_peer_id: str, stream: Stream) -> None:
        for _ in range(2):
            await stream.receive()
        if isinstance(answer, SwarmError):
            raise answer
        if answer is not None:
            await stream.send(TensorPiece(rows=answer).to_bytes())

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as swarm:
            x = await swarm.client.embed(TOKENS, model="tiny")
            honest = next(iter(swarm.servers.values())).record
            liar = swarm.internet.network()
            await liar.serve_stream("serving.forward/tiny", lie)
            async with Membership(liar) as membership:
                membership.announce(dataclasses.replace(honest, decode_ms_per_block=0.0001))
                await swarm.known(2)
                await asyncio.sleep(2)
                with caplog.at_level(logging.INFO, logger="swarm.client.remote_blocks"):
                    for _ in range(4):
                        swarm.client._state.health.worked(liar.peer_id)
                        found = await swarm.client.forward(x, model="tiny", end=3)
                        assert torch.equal(found, await swarm.client.forward(TOKENS, model="tiny", end=3))
            assert f"{liar.peer_id} failed" in caplog.text
            assert error in caplog.text

    virtual_time.run(scenario())


def test_call_is_retried_at_a_busy_server_and_not_when_it_is_too_large(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as swarm:
            (server,) = swarm.servers.values()
            x = await swarm.client.embed(TOKENS, model="tiny")
            expected = await swarm.client.forward(x, model="tiny")
            clock = asyncio.get_running_loop().time
            since_s = clock()
            async with asyncio.TaskGroup() as tasks:
                caller = Sharer(server.calls._provider_of(swarm.network.peer_id), swarm.network.peer_id)
                with contextlib.ExitStack() as taken:
                    for _ in range(4):
                        taken.enter_context(server.calls.room.reserved(caller, 1))
                    asked = tasks.create_task(swarm.client.forward(x, model="tiny"))
                    await asyncio.sleep(2.5)
                    assert not asked.done()
            assert torch.equal(asked.result(), expected)
            assert clock() - since_s < 5
            server.calls.room._max_bytes = byte_limits(100)
            with pytest.raises(ContextExceeded, match="a client may have 50"):
                await swarm.client.forward(x, model="tiny")
            server.calls._paces[server.calls._current()] = ForwardPace(MAX_PIECE_MS)
            with pytest.raises(ContextExceeded, match="a block takes 12375 ms for 12 positions here"):
                await swarm.client.forward(x, model="tiny")
            assert clock() - since_s < 6
            # a pace that other work has slowed down says nothing about later
            server.calls.room._max_bytes = byte_limits(2**30)
            server.calls._paces[server.calls._current()] = ForwardPace(MAX_PIECE_MS, idle_ms=1.0)
            with pytest.raises(PeerRefused, match="a block takes 12375 ms for 12 positions here now") as slow:
                await swarm.client.forward(x, model="tiny")
            assert slow.value.retry_after_s > 0
            assert clock() - since_s < 6 + PATIENCE_S
            server.calls._paces.clear()
            # other clients are not delayed by it
            assert len(await swarm.tokens()) == len(swarm.expected())

    virtual_time.run(scenario())


def test_call_that_is_too_large_for_one_server_waits_for_another_and_asks_the_first_once(
    boxes: Any, llama_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] * 2) as swarm:
            x = await swarm.client.embed(TOKENS, model="tiny")
            expected = await swarm.client.forward(x, model="tiny")
            small, busy = swarm.servers.values()
            small.calls.room._max_bytes = byte_limits(100)
            caller = Sharer(busy.calls._provider_of(swarm.network.peer_id), swarm.network.peer_id)
            async with asyncio.TaskGroup() as tasks:
                with (
                    contextlib.ExitStack() as taken,
                    caplog.at_level(logging.INFO, logger="swarm.client.remote_blocks"),
                ):
                    for _ in range(4):
                        taken.enter_context(busy.calls.room.reserved(caller, 1))
                    asked = tasks.create_task(swarm.client.forward(x, model="tiny"))
                    await asyncio.sleep(5)
            assert torch.equal(asked.result(), expected)
            assert caplog.text.count("no room for another call") > 2
            assert caplog.text.count("a client may have 50 here") == 1
            swarm.client._state.health.failed(swarm.who["s1"], PeerUnreachable("gone"))
            assert torch.equal(await swarm.client.forward(x, model="tiny"), expected), "it rests for a second"
            swarm.internet.crash(swarm.who["s1"])
            with pytest.raises(SessionError):  # it may come back
                await swarm.client.forward(x, model="tiny")

    virtual_time.run(scenario())


@pytest.mark.parametrize(
    "failure", [SessionError("could not compute"), PeerUnreachable("gone"), PeerRefused("leaving")]
)
def test_call_asks_a_busy_server_again_after_another_one_has_failed(
    boxes: Any, llama_dir: Path, failure: SwarmError
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] * 2) as swarm:
            x = await swarm.client.embed(TOKENS, model="tiny")
            expected = await swarm.client.forward(x, model="tiny")
            asked: list[str] = []

            async def call(network: Any, peer_id: str, *arguments: Any, **options: Any) -> Any:
                asked.append(peer_id)
                if len(asked) == 1:
                    raise PeerRefused("others call, too", retry_after_s=2.0)
                if peer_id != asked[0]:
                    raise failure
                return await called(network, peer_id, *arguments, **options)

            called = remote_blocks.call_server
            since_s = asyncio.get_running_loop().time()
            with patch.object(remote_blocks, "call_server", call):
                assert torch.equal(await swarm.client.forward(x, model="tiny"), expected)
            assert asked[-1] == asked[0]
            assert 2.0 <= asyncio.get_running_loop().time() - since_s < 4.0

    virtual_time.run(scenario())


def test_call_that_is_too_large_for_more_servers_than_may_fail_is_refused_for_its_size(
    boxes: Any, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_blocks, "MAX_FAILURES", 1)

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] * 3) as swarm:
            x = await swarm.client.embed(TOKENS, model="tiny")
            for server in swarm.servers.values():
                server.calls.room._max_bytes = byte_limits(100)
            with pytest.raises(ContextExceeded, match="a client may have 50"):
                await swarm.client.forward(x, model="tiny")

    virtual_time.run(scenario())


def test_call_does_not_wait_for_a_server_that_says_to_retry_in_an_hour(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as swarm:
            (server,) = swarm.servers.values()
            x = await swarm.client.embed(TOKENS, model="tiny")
            clock = asyncio.get_running_loop().time
            since_s = clock()
            later = PeerRefused("much to do", retry_after_s=3600.0)
            with patch.object(server.calls, "_current", side_effect=later), pytest.raises(PeerRefused, match="much"):
                await swarm.client.forward(x, model="tiny")
            assert clock() - since_s < PATIENCE_S

    virtual_time.run(scenario())


def test_tokens_of_others_keep_coming_while_a_large_backward_runs(boxes: Any, llama_dir: Path) -> None:
    num_pieces = [0]
    timed = forward_server._timed

    def counted(*arguments: Any) -> Any:
        num_pieces[0] += 1
        return timed(*arguments)

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6)]) as swarm:
            for server in swarm.servers.values():
                server.calls._paces[server.calls._current()] = ForwardPace(PIECE_MS / 8)
            blocks = await swarm.blocks()
            x = torch.randn(8, 8, 32, generator=torch.Generator().manual_seed(0))
            _, parts = await blocks.forward(x, 0, 6)
            tokens, between = [], []
            async with asyncio.TaskGroup() as tasks:
                generation = aiter(swarm.generate())
                tokens.append((await anext(generation)).token_id)
                num_pieces[0] = 0
                tasks.create_task(blocks.backward(parts, torch.ones(8, 8, 32)))
                async for token in generation:
                    tokens.append(token.token_id)
                    between.append(num_pieces[0])
            assert tokens == swarm.expected()
            assert num_pieces[0] == 2 * 8 * 5
            # a token takes a few passes of the loop, and so a few pieces
            assert sum(earlier < later for earlier, later in itertools.pairwise(between)) >= 4

    with (
        patch("swarm.serving.server.forward_server._timed", counted),
        patch("swarm.serving.server.forward_server.ForwardPace.took"),
    ):
        asyncio.run(scenario())
