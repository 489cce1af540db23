"""The gateway over the real client and real servers, on a simulated internet: what no scripted client can show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai as api
import pytest
from openai import AsyncOpenAI
from swarm.client import AsyncClient
from swarm.network.membership import Membership
from swarm.network.memory import MemoryInternet
from swarm.serving.server import SpanServer
from swarm.training.export import export_hf
from swarm.training.model import initial_theta
from swarm.training.run_config import DEFAULT_MODEL, RunConfig
from swarm_node.demo import reference
from swarm_node.gateway.app import create_app
from swarm_node.gateway.server import serving
from swarm_protocol.records import NodeRecord

PROMPT = "def fibonacci(n):\n"
SMALL = {**DEFAULT_MODEL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gateway") / "small"
    run = RunConfig(name="small", model=SMALL)
    export_hf(initial_theta(run), run, directory)
    return directory


@dataclass
class Swarm:
    internet: MemoryInternet
    openai: AsyncOpenAI
    client: AsyncClient
    servers: dict[str, SpanServer] = field(default_factory=dict)

    def num_sessions(self) -> int:
        return sum(len(server.sessions) for server in self.servers.values())


@asynccontextmanager
async def _swarm(checkpoint: Path, *spans: tuple[int, int]) -> AsyncIterator[Swarm]:
    internet = MemoryInternet()
    async with AsyncExitStack() as stack:
        network = internet.network()
        membership = await stack.enter_async_context(Membership(network))
        client = AsyncClient(network=network, membership=membership)
        url = await stack.enter_async_context(serving(create_app(client), "127.0.0.1", 0))
        openai = await stack.enter_async_context(
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        )
        swarm = Swarm(internet, openai, client)
        for start, end in spans:
            peer_id, server = await _serve(internet, stack, checkpoint, start, end)
            swarm.servers[peer_id] = server
        async with asyncio.timeout(60):
            while len(await membership.servers("small")) < len(spans) or not await membership.models():
                await asyncio.sleep(0.05)
        yield swarm


async def _serve(
    internet: MemoryInternet, stack: AsyncExitStack, checkpoint: Path, start: int, end: int
) -> tuple[str, SpanServer]:
    network = internet.network()
    membership = await stack.enter_async_context(Membership(network))
    membership.announce(
        NodeRecord(
            name="volunteer",
            version="0",
            addrs=(),
            device="cpu",
            memory_bytes=1,
            free_memory_bytes=1,
            reachability="public",
            started_at=0.0,
        )
    )
    server = SpanServer(network, membership, checkpoint, name="small", start=start, end=end)
    await server.start()
    stack.push_async_callback(server.close)
    return network.peer_id, server


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def test_streamed_tokens_are_the_models_own_also_when_a_server_dies(checkpoint: Path) -> None:
    async def main() -> None:
        async with _swarm(checkpoint, (0, 2), (0, 2), (2, 4), (2, 4)) as swarm:
            stream = await swarm.openai.completions.create(
                model="small", prompt=PROMPT, max_tokens=40, temperature=0, stream=True
            )
            texts: list[str] = []
            async for chunk in stream:
                texts.append(chunk.choices[0].text)
                if len(texts) == 8:
                    trace = await swarm.openai.get(f"/traces/{chunk.id}", cast_to=dict)
                    swarm.internet.crash(trace["hops"][-1]["peer_id"])
            trace = await swarm.openai.get(f"/traces/{chunk.id}", cast_to=dict)
            assert len(trace["replays"]) == 1
            assert trace["failover_ms"] > 0
            assert "".join(texts) == await asyncio.to_thread(reference.complete, checkpoint, PROMPT, 40)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_disconnects_frees_every_server(checkpoint: Path, stream: bool) -> None:
    async def main() -> None:
        async with _swarm(checkpoint, (0, 2), (2, 4)) as swarm:
            asking = asyncio.create_task(_ask(swarm.openai, stream=stream))
            await _until(lambda: swarm.num_sessions() == 2)
            asking.cancel()
            await asyncio.wait([asking])
            await _until(lambda: swarm.num_sessions() == 0)

    asyncio.run(main())


async def _ask(openai: AsyncOpenAI, *, stream: bool) -> None:
    answer = await openai.completions.create(model="small", prompt=PROMPT, max_tokens=900, stream=stream)
    if isinstance(answer, api.AsyncStream):
        async for _chunk in answer:
            pass


def test_model_with_a_gap_is_unavailable_and_the_blocks_are_named(checkpoint: Path) -> None:
    async def main() -> None:
        async with _swarm(checkpoint, (0, 3)) as swarm:
            with pytest.raises(api.InternalServerError, match="nobody serves blocks 3 to 4 of 4") as error:
                await swarm.openai.completions.create(model="small", prompt=PROMPT)
            assert error.value.status_code == 503
            health = await swarm.openai._client.get(str(swarm.openai.base_url).replace("/v1/", "/health"))
            assert health.status_code == 503
            assert health.json()["models"] == [{"id": "small", "num_blocks": 4, "missing_blocks": [[3, 4]]}]

    asyncio.run(main())


def test_prompt_over_the_context_is_a_bad_request(checkpoint: Path) -> None:
    async def main() -> None:
        async with _swarm(checkpoint, (0, 4)) as swarm:
            with pytest.raises(api.BadRequestError, match="over the context"):
                await swarm.openai.completions.create(model="small", prompt="x" * 2000)
            assert swarm.num_sessions() == 0

    asyncio.run(main())


def test_seeded_sampling_repeats_and_usage_counts_tokens(checkpoint: Path) -> None:
    async def main() -> None:
        async with _swarm(checkpoint, (0, 2), (2, 4)) as swarm:
            answers = [
                await swarm.openai.completions.create(
                    model="small", prompt=PROMPT, max_tokens=12, temperature=1.2, seed=5
                )
                for _ in range(2)
            ]
            assert answers[0].choices[0].text == answers[1].choices[0].text
            usage = answers[0].usage
            assert usage is not None
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 12)

    asyncio.run(main())
