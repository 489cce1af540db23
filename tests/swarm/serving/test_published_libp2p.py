"""Published models on the real network: honest servers, newcomers with other weights, and a server without the
files.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from support.network_worlds import eventually, libp2p_node
from support.published_models import PUBLISHER, STRANGER, published_copy
from swarm.client import AsyncClient
from swarm.client.async_client import ClientOptions
from swarm.network.membership import Membership
from swarm.serving.server.span_server import SpanServer

NUM_TOKENS = 16
PROMPT = "def add(a, b):\n    return"
ASKED: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS}


def test_libp2p_only_servers_that_prove_the_publisher_s_files_answer(
    llama_dir: Path, tmp_path: Path, write_tiny: Any, local_tokens: Any, make_node_record: Any, tokenize: Any
) -> None:
    published_copy(llama_dir, tmp_path / "honest")
    other = write_tiny(tmp_path / "other", "llama", seed=5)
    published_copy(other, tmp_path / "strange", publisher=STRANGER)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            seed = await libp2p_node(tmp_path / "seed")
            stack.push_async_callback(seed.close)

            async def serve(name: str, place: str, start: int, end: int) -> tuple[str, SpanServer]:
                network = await libp2p_node(tmp_path / name, peers=await seed.addrs())
                stack.push_async_callback(network.close)
                membership = await stack.enter_async_context(Membership(network))
                membership.announce(make_node_record())
                server = SpanServer(network, membership, tmp_path / place, name="tiny", start=start, end=end)
                await server.start()
                stack.push_async_callback(server.close)
                return network.peer_id, server

            honest = {(await serve(f"h{number}", "honest", *span))[0] for number, span in enumerate([(0, 3), (3, 6)])}
            for number in range(2):
                await serve(f"n{number}", "strange", 0, 6)
            liar, server = await serve("liar", "honest", 0, 6)
            assert server.deployed is not None
            # a server that announces the publisher's manifest and holds other files
            trees = list(server.deployed.loaded.held.values())
            held = dict(zip(server.deployed.loaded.held, [*trees[1:], trees[0]], strict=True))
            server.deployed.loaded = replace(server.deployed.loaded, held=held)
            failures: list[str] = []
            network = await libp2p_node(tmp_path / "client", peers=await seed.addrs())
            stack.push_async_callback(network.close)
            membership = await stack.enter_async_context(Membership(network))
            client = AsyncClient(
                network=network,
                membership=membership,
                options=ClientOptions(
                    publishers=[f"tiny={PUBLISHER.peer_id}"],
                    on_failed_proof=lambda failure: failures.append(failure.peer_id),
                ),
            )
            stack.push_async_callback(client.aclose)

            async def all_known() -> bool:
                return len(await membership.servers("tiny")) == 5

            await eventually(all_known)
            expected = local_tokens(llama_dir, tokenize(PROMPT), NUM_TOKENS)
            assert [token.token_id async for token in client.generate(**ASKED)] == expected
            async with asyncio.timeout(100):
                while client.possession.num_proven < 2 or not failures:
                    await asyncio.sleep(0.05)
            assert failures == [liar]
            assert [token.token_id async for token in client.generate(**ASKED)] == expected
            assert {hop["peer_id"] for hop in client.trace()["hops"]} == honest
            (status,) = await client.models()
            assert (status.publisher, status.standing) == (PUBLISHER.peer_id, "pinned")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
