"""Connections that send nothing or too little, or read nothing, are closed in time, while others are answered."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from node.gateway.scripted_client import Hang, ScriptedClient, ScriptedToken, converse, openai_client
from openai import APIError, AsyncOpenAI, InternalServerError
from swarm_node.gateway.app import create_app
from swarm_node.http import server
from swarm_protocol.errors import StartError

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def _connections(
    openai: AsyncOpenAI, num: int, said: bytes = b"", own_host: str = "127.0.0.1"
) -> AsyncIterator[list[Streams]]:
    host, port = openai.base_url.host, openai.base_url.port
    opened = [await asyncio.open_connection(host, port, local_addr=(own_host, 0)) for _ in range(num)]
    try:
        for _, writer in opened:
            writer.write(said)
        yield opened
    finally:
        for _, writer in opened:
            writer.transport.abort()


async def _num_closed(opened: list[Streams]) -> int:
    await asyncio.sleep(0)
    return sum(reader._eof or reader.exception() is not None for reader, _ in opened)


async def _until_closed(opened: list[Streams], num: int) -> None:
    async with asyncio.timeout(60):
        while await _num_closed(opened) < num:
            await asyncio.sleep(0.005)


def test_many_silent_connections_keep_nobody_out_and_the_oldest_are_closed() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        await openai.models.list()
        async with _connections(openai, 150) as opened:
            # one of the 20 is the client's own, which is kept since it has sent a request before
            await _until_closed(opened[:131], 131)
            assert await _num_closed(opened[131:]) == 0
            answer = await openai.completions.create(model="tiny", prompt="hi")
            assert answer.choices[0].text == "hello!"

    converse(ScriptedClient(), conversation, max_connections=20)


@pytest.mark.parametrize("said", [b"", HEAD + b"content-length: 9\r\n\r\n"], ids=["silent", "slow body"])
def test_address_with_many_connections_costs_other_addresses_none(said: bytes) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        async with _connections(openai, 1) as before, _connections(openai, 20, said, "127.0.0.2") as greedy:
            await _until_closed(greedy, 1)
            answer = await openai.completions.create(model="tiny", prompt="hi")
            assert answer.choices[0].text == "hello!"
            assert await _num_closed(before) == 0

    converse(ScriptedClient(), conversation, max_connections=20)


def test_stranger_with_many_connections_costs_a_trusted_proxy_none_in_use() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        said = HEAD + b"content-length: 9\r\n\r\n"
        async with _connections(openai, 12, said) as proxied, _connections(openai, 20, said, "127.0.0.2") as greedy:
            await _until_closed(greedy, 12)
            assert await _num_closed(proxied) == 0

    converse(ScriptedClient(), conversation, max_connections=20, proxies=["127.0.0.1"])


@pytest.mark.parametrize("said", [b"", b"G", HEAD])
def test_connection_without_a_whole_head_is_closed_in_time(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(server, "HTTP_HEAD_TIMEOUT_S", 0.1)

    async def conversation(openai: AsyncOpenAI) -> None:
        async with _connections(openai, 3, said) as opened:
            await _until_closed(opened, 3)

    converse(ScriptedClient(), conversation)


def test_connection_with_a_dripping_second_head_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HTTP_HEAD_TIMEOUT_S", 0.2)

    async def conversation(openai: AsyncOpenAI) -> None:
        async with _connections(openai, 1, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /he") as opened:
            [(reader, _)] = opened
            assert b" 200 " in await reader.readline()
            async with asyncio.timeout(60):
                await reader.read()

    converse(ScriptedClient(), conversation)


def test_connection_is_kept_after_an_answer_for_as_long_as_a_new_one_may_be_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenAI's client keeps idle connections for 5 s: one that the server closed then would fail its next request."""
    kept_s: list[float] = []
    complete = server.BoundedHttp.on_response_complete

    def look(self: server.BoundedHttp) -> None:
        complete(self)
        assert self.timeout_keep_alive_task is not None
        kept_s.append(self.timeout_keep_alive_task.when() - self.loop.time())

    monkeypatch.setattr(server.BoundedHttp, "on_response_complete", look)

    async def conversation(openai: AsyncOpenAI) -> None:
        await openai.models.list()

    converse(ScriptedClient(), conversation)
    (seconds,) = kept_s
    assert seconds > server.HTTP_HEAD_TIMEOUT_S / 2


@pytest.mark.parametrize(
    "said", [b"no request\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: any\r\n\r\n"]
)
def test_requests_of_strangers_are_not_logged(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        async with _connections(openai, 3, said) as opened, asyncio.timeout(60):
            for reader, _ in opened:
                assert await reader.readline() in {b"HTTP/1.1 400 Bad Request\r\n", b"HTTP/1.1 200 OK\r\n"}

    converse(ScriptedClient(), conversation)
    assert caplog.messages == []


def test_answer_longer_than_the_time_for_a_head_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HTTP_HEAD_TIMEOUT_S", 0.05)
    go_on = asyncio.Event()
    client = ScriptedClient(script=[ScriptedToken("a"), go_on, ScriptedToken("b", "stop")])

    async def conversation(openai: AsyncOpenAI) -> None:
        asyncio.get_running_loop().call_later(0.2, go_on.set)
        answer = await openai.completions.create(model="tiny", prompt="hi")
        assert answer.choices[0].text == "ab"

    converse(client, conversation)


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_reader_that_stops_is_cut_off_and_everyone_else_answered(
    monkeypatch: pytest.MonkeyPatch, stream: bytes
) -> None:
    """The reader stops in a stream, or in the middle of a long whole answer.

    The test's own buffer takes at most 128 KiB.
    """
    monkeypatch.setattr(server, "HTTP_WRITE_TIMEOUT_S", 0.1)
    cut_off = asyncio.Event()
    lost = server.BoundedHttp.connection_lost

    def hear(self: server.BoundedHttp, error: Exception | None) -> None:
        lost(self, error)
        cut_off.set()

    monkeypatch.setattr(server.BoundedHttp, "connection_lost", hear)
    last = ScriptedToken("", "stop")
    client = ScriptedClient(scripts=[[*[ScriptedToken("x" * 10_000)] * 2000, last], [ScriptedToken("y"), last]])
    request = b'{"model":"tiny","prompt":"hi","stream":' + stream + b"}"
    said = HEAD + b"content-length: %d\r\n\r\n" % len(request) + request

    async def conversation(openai: AsyncOpenAI) -> None:
        async with _connections(openai, 1, said), asyncio.timeout(60):
            await cut_off.wait()
            answer = await openai.completions.create(model="tiny", prompt="hi")
            assert answer.choices[0].text == "y"
            while client.num_open:
                await asyncio.sleep(0.005)

    converse(client, conversation)
    assert client.num_finished == 2


def test_answer_that_runs_when_the_server_ends_is_finished() -> None:
    go_on = asyncio.Event()
    client = ScriptedClient(script=[ScriptedToken("a"), go_on, ScriptedToken("b", "stop")])

    async def main() -> None:
        listener = server.listen("127.0.0.1", 0)
        address = listener.getsockname()
        async with server.serving(create_app(client), listener, grace_s=10) as url:
            openai = openai_client(url, timeout_s=60)
            stream = await openai.completions.create(model="tiny", prompt="hi", stream=True)
            texts = [(await anext(stream)).choices[0].text]

            async def read_on() -> None:
                while await _is_listening(address):
                    await asyncio.sleep(0.01)
                go_on.set()
                texts.extend([chunk.choices[0].text async for chunk in stream])

            reading = asyncio.create_task(read_on())
        await reading
        await openai.close()
        assert "".join(texts) == "ab"

    asyncio.run(main())


async def _is_listening(address: tuple[str, int]) -> bool:
    try:
        _, writer = await asyncio.open_connection(*address)
    except ConnectionError:
        return False
    writer.close()
    return True


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_running_answers_are_ended_with_an_error_when_the_server_ends(
    is_cancelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client = ScriptedClient(scripts=[[ScriptedToken("a"), Hang()]] * 2)

    async def served(urls: asyncio.Queue[str]) -> None:
        async with server.serving(create_app(client), server.listen("127.0.0.1", 0), grace_s=0) as url:
            urls.put_nowait(url)
            await has_begun.wait()
            if is_cancelled:
                await asyncio.Event().wait()

    async def main() -> None:
        urls = asyncio.Queue[str]()
        serving = asyncio.create_task(served(urls))
        async with openai_client(await urls.get(), timeout_s=60) as openai:
            asking = asyncio.create_task(openai.completions.create(model="tiny", prompt="hi"))
            await client.reached.wait()
            stream = await openai.completions.create(model="tiny", prompt="hi", stream=True)
            assert (await anext(stream)).choices[0].text == "a"
            has_begun.set()
            if is_cancelled:
                serving.cancel()
            await asyncio.wait({serving})
            assert serving.cancelled() == is_cancelled
            assert (client.num_open, client.num_finished) == (0, 2)
            with pytest.raises(InternalServerError, match="this server is stopping") as refused:
                await asking
            assert (refused.value.status_code, refused.value.code) == (503, "service_unavailable")
            with pytest.raises(APIError, match="this server is stopping"):
                await anext(stream)

    has_begun = asyncio.Event()
    asyncio.run(main())
    assert caplog.messages == []


@pytest.mark.parametrize(("host", "own"), [("0.0.0.0", "127.0.0.9"), ("127.0.0.1", "127.0.0.1")])
def test_url_of_a_server_on_all_interfaces_names_an_address_of_this_machine(
    host: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "source_addresses", lambda: ("127.0.0.9", "2001:db8::7"))

    async def main() -> None:
        async with server.serving(create_app(ScriptedClient()), server.listen(host, 0)) as url:
            assert url.startswith(f"http://{own}:")
            async with openai_client(url, timeout_s=60) as openai:
                await openai.models.list()

    asyncio.run(main())


def test_connections_leave_half_of_the_files_to_the_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.resource, "getrlimit", lambda _what: (256, 4096))
    assert server.default_max_connections() == 128
    monkeypatch.setattr(server.resource, "getrlimit", lambda _what: (2**20, 2**20))
    assert server.default_max_connections() == server.MAX_CONNECTIONS


def test_listen_on_a_name_that_does_not_resolve_reports_the_resolver_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_arguments: object, **_options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(server.socket, "getaddrinfo", unknown)
    with pytest.raises(StartError, match="nohost is not an address of this machine: name or service not known:"):
        server.is_local("nohost")


@pytest.mark.parametrize("host", ["x" * 64, "attic..lan"])
def test_name_that_dns_cannot_encode_has_no_address(host: str) -> None:
    for look_up in (server.is_local, lambda name: server.listen(name, 0)):
        with pytest.raises(StartError, match=f"^--host {host} is not an address of this machine: "):
            look_up(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_listen_on_an_address_of_another_machine_says_so(host: str) -> None:
    with pytest.raises(StartError, match="is not an address of this machine") as caught:
        server.listen(host, 0)
    assert "127.0.0.1" in caught.value.remedy
