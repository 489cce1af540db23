"""TCP connections opened from a listen port, with real sockets on loopback. `tests/internet` has NATs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import uvloop
from support.free_ports import free_port
from swarm.network.paths import opener
from swarm.network.paths.opener import ListenEndpoint, NotALibp2pHost, listen_endpoints, open_path
from swarm.testing import virtual_time

GREETING = b"\x13/multistream/1.0.0\n"
PROPOSAL = b"\x07/noise\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(case: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(case)


def shared_socket(port: int) -> socket.socket:
    """Open a socket at a port that others use as well, such as go-libp2p's and the opener's."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


async def listener(port: int, serve: Serve) -> asyncio.Server:
    return await asyncio.start_server(serve, sock=shared_socket(port))


def here(port: int) -> ListenEndpoint:
    return ListenEndpoint(bind=("127.0.0.1", port), reach=("127.0.0.1", port))


def test_dial_that_meets_an_opener_reaches_its_listener() -> None:
    received = bytearray()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def dial(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Act as the side that dialled. Only its SYN is missing, which loopback would refuse before it could meet."""
        writer.write(GREETING + PROPOSAL + bytes(1_000_000))
        received.extend(await reader.readexactly(28 + 1_000_000))
        writer.close()

    async def case() -> None:
        there, own = free_port(), free_port()
        dialler, listening = await listener(there, dial), await listener(own, echo)
        place, opened = ListenEndpoint(bind=("127.0.0.1", free_port()), reach=("127.0.0.1", own)), asyncio.Event()
        assert await open_path(place, ("127.0.0.1", there), opened.set)
        assert opened.is_set()
        assert received == GREETING + PROPOSAL + bytes(1_000_000)
        dialler.close()
        listening.close()

    run(case())


def test_opener_that_is_cancelled_leaves_both_sides() -> None:
    async def case() -> None:
        num_left, all_left = 0, asyncio.Event()

        async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_left
            writer.write(GREETING + PROPOSAL)
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
            num_left += 1
            if num_left == 2:
                all_left.set()

        there, own = free_port(), free_port()
        servers = await listener(there, stay), await listener(own, stay)
        place, opened = ListenEndpoint(bind=("127.0.0.1", free_port()), reach=("127.0.0.1", own)), asyncio.Event()
        opening = asyncio.create_task(open_path(place, ("127.0.0.1", there), opened.set))
        await opened.wait()
        opening.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.wait((opening,))
                await all_left.wait()
        for server in servers:
            server.close()
        assert num_left == len(servers)

    asyncio.run(case())  # uvloop would wait at its end for open sockets


def test_opener_leaves_when_it_finds_a_listener_and_frees_the_ports_at_once() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    async def case() -> None:
        port, there = free_port(), free_port()
        server = await listener(there, greet)
        assert not await open_path(here(port), ("127.0.0.1", there), pytest.fail)
        sock = shared_socket(port)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", there))
        sock.close()
        await asyncio.sleep(0.05)
        server.close()

    run(case())


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n", b"", b"HTTP"])
def test_opener_leaves_a_listener_that_is_no_libp2p_host(said: bytes) -> None:
    async def other(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    async def case() -> None:
        port, there = free_port(), free_port()
        server = await listener(there, other)
        with pytest.raises(NotALibp2pHost):
            await open_path(here(port), ("127.0.0.1", there), pytest.fail)
        server.close()

    run(case())


def test_opener_gives_up_when_nobody_answers_or_the_listener_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opener, "OPEN_S", 0.2)
    monkeypatch.setattr(opener, "FIRST_BYTES_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    async def case() -> None:
        port, there = free_port(), free_port()
        with pytest.raises(TimeoutError):
            await open_path(here(port), ("127.0.0.1", there), pytest.fail)
        server = await listener(there, silent)
        with pytest.raises(TimeoutError):
            await open_path(here(port), ("127.0.0.1", there), pytest.fail)
        server.close()

    run(case())


def test_opener_dials_ipv6_from_a_port_that_another_program_has_for_ipv4() -> None:
    async def case() -> None:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as there, socket.socket() as other:
            other.bind(("0.0.0.0", 0))
            other.listen()
            port = other.getsockname()[1]
            _, writer = await opener._connect(("::", port), there.getsockname()[:2])
            assert writer.get_extra_info("sockname")[1] == port
            writer.transport.abort()

    run(case())


def test_machine_that_refuses_gets_few_syns(monkeypatch: pytest.MonkeyPatch) -> None:
    sent_at: list[float] = []

    async def refuse(sock: socket.socket, _address: object) -> None:
        sent_at.append(asyncio.get_running_loop().time())
        raise ConnectionRefusedError

    async def case() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", refuse)
        with pytest.raises(TimeoutError):
            await open_path(here(0), ("127.0.0.1", 1), pytest.fail)

    virtual_time.run(case())
    pauses = [after - before for before, after in pairwise(sent_at)]
    assert len(sent_at) == 6
    assert pauses == pytest.approx([opener.REFUSED_PAUSE_S * 2**i for i in range(5)])


@pytest.mark.parametrize(
    ("listen", "addrs", "places"),
    [
        (("/ip4/0.0.0.0/tcp/4001",), (), {4: (("0.0.0.0", 4001), ("127.0.0.1", 4001))}),
        (("/ip4/0.0.0.0/tcp/0",), ("/ip4/127.0.0.1/tcp/5005",), {4: (("0.0.0.0", 5005), ("127.0.0.1", 5005))}),
        (("/ip4/44.1.1.1/tcp/7",), (), {4: (("44.1.1.1", 7), ("44.1.1.1", 7))}),
        (("/ip6/::/tcp/9",), (), {6: (("::", 9), ("::1", 9))}),
        (("/ip4/127.0.0.1/tcp/0",), ("/ip4/127.0.0.1/tcp/5005",), {}),
        ((), ("/ip4/127.0.0.1/tcp/5005",), {}),
    ],
)
def test_listener_is_an_address_that_peers_on_other_machines_can_use(
    listen: tuple[str, ...], addrs: tuple[str, ...], places: dict[int, tuple[tuple[str, int], tuple[str, int]]]
) -> None:
    found = listen_endpoints(listen, addrs)
    assert {version: (place.bind, place.reach) for version, place in found.items()} == places
