"""Tiny models of several families, and a swarm of servers around one client on a simulated internet."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.faults import Fault, FaultScript
from support.loaded_spans import sharing_load
from support.text_models import byte_tokenizer
from support.tiny_models import FAMILIES, local_tokens, write_model
from support.tokenizer_here import TokenizerHere
from swarm.client import AsyncClient, Generation
from swarm.client.async_client import ClientOptions
from swarm.client.remote_blocks import ForwardOptions, RemoteBlocks
from swarm.client.text_at_home import KeptModels
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.serving.checking.spot_checks import SpotCheckOptions
from swarm.serving.server.deployment import ServerOptions
from swarm.serving.server.span_server import SpanServer
from swarm.serving.session.client_state import SessionOptions
from swarm.serving.tokenizer.model_assets import ModelAssets
from swarm_protocol.records import NodeRecord

NUM_TOKENS = 16
SMALL_CACHE = ServerOptions(kv_bytes=2**20)
"""Many times what a test's sessions need. The system clears up to 2 MiB a tensor for the pages ahead of a large one."""

PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model_dirs("llama")` returns a directory with a tiny model of that family, which is written once."""
    written: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in written:
            written[family] = write_model(tmp_path_factory.mktemp(family), FAMILIES[family]())
        return written[family]

    return get


@pytest.fixture(scope="session")
def llama_dir(model_dirs: Callable[[str], Path]) -> Path:
    return model_dirs("llama")


shared_load = sharing_load()


@dataclass
class Box:
    """Servers and a client that know each other. `servers` lists peer ids in the order of their spans."""

    internet: MemoryInternet
    directory: Path
    stack: AsyncExitStack
    network: MemoryNetwork
    membership: Membership
    client: AsyncClient
    servers: dict[str, SpanServer] = field(default_factory=dict)
    who: dict[str, str] = field(default_factory=dict)

    async def add(
        self, start: int, end: int, options: ServerOptions | None = None, *, name: str = "tiny", who: str = ""
    ) -> SpanServer:
        """Add a server, which fault scripts call `who`."""
        network = self.internet.network()
        self.who[who or f"s{len(self.servers)}"] = network.peer_id
        membership = await self.stack.enter_async_context(Membership(network))
        membership.announce(node_record())
        chosen = options or SMALL_CACHE
        server = SpanServer(network, membership, self.directory, name=name, start=start, end=end, options=chosen)
        await server.start()
        self.stack.push_async_callback(server.close)
        self.servers[network.peer_id] = server
        return server

    @asynccontextmanager
    async def visitor(self) -> AsyncIterator[AsyncClient]:
        """Yield a client of another peer."""
        network = self.internet.network()
        async with (
            Membership(network) as membership,
            aclosing(AsyncClient(network=network, membership=membership)) as client,
        ):
            yield client

    async def known(self, num_servers: int, name: str = "tiny") -> None:
        """Wait until the client sees `num` servers."""
        async with asyncio.timeout(60):
            while len(await self.membership.servers(name)) < num_servers:
                await asyncio.sleep(0.1)

    def generate(self, num_tokens: int | None = NUM_TOKENS, **options: Any) -> Generation:
        return self.client.generate(**{"model": "tiny", "prompt": PROMPT, "max_tokens": num_tokens, **options})

    async def tokens(self, num_tokens: int | None = NUM_TOKENS, **options: Any) -> list[int]:
        return [token.token_id async for token in self.generate(num_tokens, **options)]

    async def kit(self) -> ModelAssets:
        """Return what the client has made of the servers' files."""
        return await self.client._assets_of("tiny")

    async def blocks(self, *, head: bool = False) -> RemoteBlocks:
        """Return the client's remote blocks."""
        chosen = await self.client._catalog.to_use("tiny")
        return await (await self.client._tensors()).blocks(chosen, ForwardOptions(head=head))

    def expected(self, num_tokens: int = NUM_TOKENS) -> list[int]:
        """Return the answer to PROMPT that a single machine computes."""
        return local_tokens(self.directory, byte_tokenizer()(PROMPT)["input_ids"], num_tokens)

    async def all_freed(self) -> None:
        """Wait until no server holds a session or a reserved token any more."""
        async with asyncio.timeout(10):
            while any(server.sessions for server in self.servers.values()):
                await asyncio.sleep(0.01)
        for server in self.servers.values():
            assert server.record.free_kv_tokens == server.deployed.loaded.kv_tokens


def node_record() -> NodeRecord:
    return NodeRecord(
        name="box",
        version="0",
        addrs=(),
        device="cpu",
        memory_bytes=1,
        free_memory_bytes=1,
        reachability="public",
        started_at=0.0,
    )


@asynccontextmanager
async def box(
    directory: Path,
    spans: Sequence[tuple[int, int]],
    *,
    session: SessionOptions | None = None,
    faults: Sequence[Fault] = (),
    detection_s: float = 0.0,
    options: ServerOptions | None = None,
    checks: SpotCheckOptions | None = None,
    text_at_home: KeptModels | None = None,
) -> AsyncIterator[Box]:
    """Servers s0, s1, … of `spans` and a client that sees them all.

    Each of `faults` must have fired by the end. The client notices a dead server after `detection_s`; 0, the default,
    is a kernel that resets its connections.
    """
    internet = MemoryInternet(detection_s=detection_s)
    script = FaultScript(faults, kill=lambda who: internet.crash(swarm.who[who]))
    async with AsyncExitStack() as stack:
        stack.enter_context(patch("swarm.serving.server.deployment.load", shared_load))
        stack.enter_context(patch("swarm.client.assets_cache.TokenizerProcess", TokenizerHere))
        network = internet.network()
        membership = await stack.enter_async_context(Membership(network))
        client = await stack.enter_async_context(
            aclosing(
                AsyncClient(
                    network=network,
                    membership=membership,
                    options=ClientOptions(
                        session=dataclasses.replace(session or SessionOptions(), checks=checks),
                        text_at_home=text_at_home or {},
                    ),
                )
            )
        )
        stack.push_async_callback(client.aclose)
        swarm = Box(internet, directory, stack, network, membership, client)
        for index, (start, end) in enumerate(spans):
            hook = script.hook(f"s{index}")
            await swarm.add(start, end, dataclasses.replace(options or SMALL_CACHE, failpoints=hook))
        await swarm.known(len(spans))
        yield swarm
        script.assert_all_fired()


@pytest.fixture(scope="session")
def boxes() -> Any:
    """`async with boxes(directory, [(0, 3), (3, 6)]) as box:` starts such a swarm."""
    return box


@pytest.fixture(scope="session", name="local_tokens")
def local_tokens_fixture() -> Any:
    """`local_tokens(directory, prompt_ids, num_tokens)` returns what transformers generates greedily on one machine."""
    return local_tokens


@pytest.fixture(scope="session")
def write_tiny() -> Any:
    """`write_tiny(directory, family, seed=0)` writes another model of a family."""

    def write(directory: Path, family: str, seed: int = 0) -> Path:
        return write_model(directory, FAMILIES[family](), seed)

    return write


@pytest.fixture(scope="session")
def write_config() -> Callable[[Path, Any], Path]:
    """`write_config(directory, config)` writes a model of any config."""
    return write_model


@pytest.fixture(scope="session")
def make_node_record() -> Callable[[], NodeRecord]:
    return node_record


@pytest.fixture(scope="session")
def tokenize() -> Callable[[str], list[int]]:
    """Return the token ids that the tiny models' tokenizer gives for a prompt."""
    tokenizer = byte_tokenizer()
    return lambda prompt: [int(token) for token in tokenizer(prompt)["input_ids"]]
