"""The real network: servers, a spare and a client on separate libp2p hosts, and one server killed in mid-answer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import uvloop
from support.leaks import no_leaks
from support.network_worlds import eventually, libp2p_node
from swarm.client import AsyncClient, Client, SamplingParams
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.membership import Membership
from swarm.serving.server.span_server import SpanServer
from swarm_protocol.errors import SessionError, StartError
from swarm_protocol.sampler import Grammar

NUM_TOKENS = 24
PROMPT = "def add(a, b):\n    return"
ASKED: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS}
STEERED = SamplingParams(
    grammar=Grammar(kind="lark", text="start: /[a-z]{3,8}( [a-z]{3,8}){9,}/"),
    temperature=1.0,
    seed=11,
    presence_penalty=0.5,
    repetition_penalty=1.2,
)


@asynccontextmanager
async def three_servers(
    tmp_path: Path, model_dir: Path, make_node_record: Any
) -> AsyncIterator[tuple[Libp2pNetwork, dict[str, int], AsyncClient]]:
    """Start a seed, servers of blocks 0:3, 3:6 and 3:6, and a client that knows all three. Yield the seed, the process
    id of each server's daemon, and the client."""
    async with AsyncExitStack() as stack:
        seed = await libp2p_node(tmp_path / "seed")
        stack.push_async_callback(seed.close)
        daemons: dict[str, int] = {}
        for index, (start, end) in enumerate([(0, 3), (3, 6), (3, 6)]):
            network = await libp2p_node(tmp_path / f"s{index}", peers=await seed.addrs())
            stack.push_async_callback(network.close)
            membership = await stack.enter_async_context(Membership(network))
            membership.announce(make_node_record())
            server = SpanServer(network, membership, model_dir, name="tiny", start=start, end=end)
            await server.start()
            stack.push_async_callback(server.close)
            daemons[network.peer_id] = network._host.daemon.pid
        client = await stack.enter_async_context(
            AsyncClient.connect(peers=await seed.addrs(), network_id=seed.network_id)
        )

        async def all_known() -> bool:
            return any(model.num_servers == 3 for model in await client.models())

        await eventually(all_known)
        yield seed, daemons, client


def test_libp2p_answer_loses_no_token_when_a_server_is_killed(
    llama_dir: Path, tmp_path: Path, local_tokens: Any, make_node_record: Any, tokenize: Any
) -> None:
    async def main() -> None:
        async with three_servers(tmp_path, llama_dir, make_node_record) as (seed, daemons, client):
            steered = [token.token_id async for token in client.generate(**ASKED, sampling=STEERED)]
            generation = client.generate(**ASKED)
            tokens = []
            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 8:
                    victim = generation.trace()["hops"][1]["peer_id"]
                    os.kill(daemons[victim], signal.SIGKILL)
            assert tokens == local_tokens(llama_dir, tokenize(PROMPT), NUM_TOKENS)
            (replay,) = generation.trace()["replays"]
            assert replay["lost_peer"] == victim
            assert replay["failover_ms"] < 3000

            # the same from a synchronous program
            addrs = await seed.addrs()
            assert await asyncio.to_thread(ask, addrs, seed.network_id) == (tokens, steered)

    def ask(addrs: tuple[str, ...], network_id: str) -> tuple[list[int], list[int]]:
        with Client(peers=addrs, network_id=network_id) as client:
            assert [model.name for model in client.models()] == ["tiny"]
            steered = [token.token_id for token in client.generate(**ASKED, sampling=STEERED)]
            found = [token.token_id for token in client.generate(**ASKED)]
            assert client.trace()["num_tokens"] == NUM_TOKENS
            early = client.generate(**ASKED)
            next(early)
            early.close()  # type: ignore[attr-defined]
            unread = client.generate(**ASKED)
            next(unread)
        with pytest.raises(SessionError, match="closed"):
            next(unread)
        with pytest.raises(SessionError, match="not connected"):
            client.models()
        return found, steered

    # the first uvloop of a process leaves a pipe for signals open
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as first:
        first.run(asyncio.sleep(0))
    with no_leaks(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_libp2p_answer_that_has_grown_loses_no_token_when_a_server_is_killed(
    llama_dir: Path, tmp_path: Path, local_tokens: Any, make_node_record: Any, tokenize: Any
) -> None:
    """The session has room for 16 tokens of the answer at first, and the server dies with 60 of them."""
    num_tokens = 120

    async def main() -> None:
        async with three_servers(tmp_path, llama_dir, make_node_record) as (_, daemons, client):
            generation = client.generate(model="tiny", prompt=PROMPT, ignore_eos=True)
            tokens = []
            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 60:
                    os.kill(daemons[generation.trace()["hops"][1]["peer_id"]], signal.SIGKILL)
            context = await client.context_tokens("tiny")
            assert len(tokens) == context - generation.num_prompt_tokens
            assert tokens[:num_tokens] == local_tokens(llama_dir, tokenize(PROMPT), num_tokens)
            assert len(generation.trace()["replays"]) == 1

    with (
        patch("swarm.serving.session.session_messages.GROWTH_TOKENS", 16),
        no_leaks(),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(main())


def test_client_names_an_unreachable_seed() -> None:
    nobody = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDCk5yi8o2mH6tUjbnnEjLi6iXNwA6LjpmtUQHUxxkdTy"
    with no_leaks(), pytest.raises(StartError, match=f"could be reached: {nobody}"), Client(peers=[nobody]):
        pass
