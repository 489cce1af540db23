"""Opens ten thousand silent connections to a gateway and to a libp2p node, over real sockets on loopback.

.venv/bin/python -m pytest tests/chaos/test_chaos_connections.py -m chaos -s
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from node.gateway.scripted_client import ScriptedClient
from openai import AsyncOpenAI
from support.leaks import no_leaks
from support.network_worlds import libp2p_node
from swarm_node.gateway.app import create_app
from swarm_node.http.server import MAX_CONNECTIONS, listen, serving

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

NUM_SILENT = 10_000
NUM_OTHER_FILES = 2_500
"""The number of other files that this process opens, including the gateway's side of the connections."""
AT_ONCE = 200
NUM_ASKED = 20


@pytest.fixture
def num_silent() -> int:
    """Return NUM_SILENT, or as many as this process may open: a system may allow fewer files, even on request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = NUM_SILENT + NUM_OTHER_FILES
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    return max(soft, allowed) - NUM_OTHER_FILES if max(soft, allowed) < wanted else NUM_SILENT


@asynccontextmanager
async def _silent(host: str, port: int, num: int) -> AsyncIterator[int]:
    """Open `num` connections, and yield how many could be opened. Connections that are closed by the peer stay
    closed."""
    writers: list[asyncio.StreamWriter] = []

    places = iter(range(num))

    async def open_some() -> None:
        with contextlib.suppress(ConnectionError):
            for _ in places:
                _, writer = await asyncio.open_connection(host, port)
                writers.append(writer)

    await asyncio.gather(*(open_some() for _ in range(AT_ONCE)))
    try:
        yield len(writers)
    finally:
        for writer in writers:
            writer.transport.abort()


async def _eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.1)


def test_gateway_answers_beside_thousands_of_silent_connections(num_silent: int) -> None:
    async def main() -> None:
        process = psutil.Process()
        with no_leaks():
            app, listener = create_app(ScriptedClient()), listen("127.0.0.1", 0)
            async with (
                serving(app, listener) as url,
                AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as openai,
            ):
                await openai.models.list()
                before = process.num_fds()
                host, port = listener.getsockname()
                async with _silent(host, port, num_silent) as num_opened:
                    slowest_s = 0.0
                    for _ in range(NUM_ASKED):
                        since_s = time.monotonic()
                        answer = await openai.completions.create(model="tiny", prompt="hi")
                        slowest_s = max(slowest_s, time.monotonic() - since_s)
                        assert answer.choices[0].text == "hello!"
                    assert num_opened == num_silent
                    await _eventually(lambda: process.num_fds() <= before + num_silent + MAX_CONNECTIONS)
                await _eventually(lambda: process.num_fds() <= before)
        print(f"\n{num_opened} silent connections to a gateway: the slowest answer took {slowest_s:.2f} s")

    asyncio.run(main())


async def _echo(_peer_id: str, request: bytes) -> bytes:
    return request


def test_libp2p_node_answers_beside_thousands_of_silent_connections(num_silent: int, tmp_path: Path) -> None:
    async def main() -> None:
        with no_leaks():
            async with (
                await libp2p_node(tmp_path / "server") as server,
                await libp2p_node(tmp_path / "client", peers=await server.addrs()) as client,
            ):
                await server.serve("echo", _echo)
                assert await client.call(server.peer_id, "echo", b"before", timeout_s=60) == b"before"
                daemon = psutil.Process(server._host.daemon.pid)
                before = daemon.num_fds()
                _, _, host, _, port, *_ = (await server.addrs())[0].split("/")
                async with _silent(host, int(port), num_silent) as num_opened:
                    slowest_s = 0.0
                    for _ in range(NUM_ASKED):
                        since_s = time.monotonic()
                        assert await client.call(server.peer_id, "echo", b"meanwhile", timeout_s=60) == b"meanwhile"
                        slowest_s = max(slowest_s, time.monotonic() - since_s)
                    assert num_opened == num_silent
                    at_most = daemon.num_fds()
                await _eventually(lambda: daemon.num_fds() <= before + 2)
                assert await client.call(server.peer_id, "echo", b"after", timeout_s=60) == b"after"
        print(f"\n{num_opened} silent connections to a node, whose daemon had {at_most} files open ({before} before):")
        print(f"the slowest answer took {slowest_s:.2f} s")

    asyncio.run(main())
