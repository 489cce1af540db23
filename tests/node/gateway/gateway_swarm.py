"""The gateway over the real client and real servers of the model `small`, on a simulated internet."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from node.gateway.scripted_client import openai_client
from openai import AsyncOpenAI
from support.loaded_spans import sharing_load
from support.plain_records import node_record
from support.tokenizer_here import TokenizerHere
from swarm.client import AsyncClient, UsedRevisions
from swarm.client.async_client import ClientOptions
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.serving.server.deployment import LoadedSpan, ServerOptions
from swarm.serving.server.span_server import SpanServer
from swarm.serving.session.client_state import SessionOptions
from swarm.serving.tokenizer.model_assets import TokenizerLimits
from swarm_node.gateway.app import create_app
from swarm_node.http.server import listen, serving

COPIES: defaultdict[int, Callable[[Path, int, int, ServerOptions], LoadedSpan]] = defaultdict(sharing_load)
"""What loads a span for the first server of a swarm that serves it, for the second, and so on."""


def loads() -> Callable[[Path, int, int, ServerOptions], LoadedSpan]:
    """Return `load` for the servers of one swarm. Each gets its own span, which those of earlier swarms had before."""
    num_loaded = Counter[tuple[Path, int, int]]()

    def cached_load(directory: Path, start: int, end: int, options: ServerOptions) -> LoadedSpan:
        num_loaded[directory, start, end] += 1
        return COPIES[num_loaded[directory, start, end]](directory, start, end, options)

    return cached_load


@dataclass
class Swarm:
    internet: MemoryInternet
    stack: AsyncExitStack
    network: MemoryNetwork
    membership: Membership
    openai: AsyncOpenAI
    client: AsyncClient
    servers: dict[str, SpanServer] = field(default_factory=dict)

    def num_free_tokens(self) -> list[int]:
        return [server.record.free_kv_tokens for server in self.servers.values()]

    def num_sessions(self) -> int:
        return sum(len(server.sessions) for server in self.servers.values())

    async def add(self, checkpoint: Path, start: int, end: int, options: ServerOptions | None = None) -> SpanServer:
        network = self.internet.network()
        membership = await self.stack.enter_async_context(Membership(network))
        membership.announce(node_record())
        server = SpanServer(network, membership, checkpoint, name="small", start=start, end=end, options=options)
        await server.start()
        self.stack.push_async_callback(server.close)
        self.servers[network.peer_id] = server
        return server

    async def known(self) -> None:
        """Wait until the gateway sees all servers."""
        async with asyncio.timeout(60):
            while not (
                len(await self.membership.servers("small")) == len(self.servers) and await self.membership.models()
            ):
                await asyncio.sleep(0.05)


async def gateway(stack: AsyncExitStack, client: AsyncClient) -> AsyncOpenAI:
    """Return a gateway over the client, and an HTTP client of it."""
    url = await stack.enter_async_context(serving(create_app(client), listen("127.0.0.1", 0)))
    return await stack.enter_async_context(openai_client(url, timeout_s=60))


@asynccontextmanager
async def gateway_swarm(
    checkpoint: Path,
    *spans: tuple[int, int],
    options: ServerOptions | None = None,
    tokenizers: TokenizerLimits | None = None,
    used: UsedRevisions | None = None,
    patience_s: float = 20.0,
) -> AsyncIterator[Swarm]:
    """With `tokenizers`, tokenizers are separate processes with these limits."""
    internet = MemoryInternet()
    async with AsyncExitStack() as stack:
        stack.enter_context(patch("swarm.serving.server.deployment.load", loads()))
        if tokenizers is None:
            stack.enter_context(patch("swarm.client.assets_cache.TokenizerProcess", TokenizerHere))
        network = internet.network()
        membership = await stack.enter_async_context(Membership(network))
        client_options = ClientOptions(
            session=SessionOptions(patience_s=patience_s),
            tokenizers=tokenizers or TokenizerLimits(),
            used=used or UsedRevisions(),
        )
        client = await stack.enter_async_context(
            aclosing(AsyncClient(network=network, membership=membership, options=client_options))
        )
        openai = await gateway(stack, client)
        swarm = Swarm(internet, stack, network, membership, openai, client)
        for start, end in spans:
            await swarm.add(checkpoint, start, end, options)
        await swarm.known()
        yield swarm
