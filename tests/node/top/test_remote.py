"""The source over HTTP, against a real dashboard and against servers that lie."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from support.dashboard_source import ExampleSource
from swarm_node.dashboard.app import create_dashboard
from swarm_node.http.server import listen, serving
from swarm_node.top import remote as remote_module
from swarm_node.top.remote import DashboardClient
from swarm_protocol.errors import PeerUnreachable, PeerViolation

from .conftest import swarm

WITHIN_S = 60.0


@asynccontextmanager
async def dashboard(source: ExampleSource) -> AsyncIterator[str]:
    """Return the URL of a real dashboard over `source`."""
    app = create_dashboard(source)
    async with serving(app, listen("127.0.0.1", 0)) as url:
        yield url
        app.state.live.close()


@asynccontextmanager
async def following(url: str) -> AsyncIterator[DashboardClient]:
    async with httpx.AsyncClient() as client:
        remote = DashboardClient(client, url)
        await remote.start()
        task = asyncio.create_task(remote.follow())
        try:
            yield remote
        finally:
            task.cancel()
            await asyncio.wait({task})


async def until(remote: DashboardClient, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await remote.wait_changed()


def test_real_dashboard_is_read_and_its_changes_arrive() -> None:
    source = swarm(8)

    async def scene() -> None:
        async with dashboard(source) as url, following(f"{url}/") as remote:
            assert remote.overview() == source.overview()
            name = remote.overview().models[0].name
            assert await remote.model(name) == await source.model(name)
            assert remote.nodes() == ()
            await until(remote, lambda: len(remote.nodes()) == 8)
            assert remote.nodes() == source.nodes()
            run = remote.overview().runs[0].run
            assert await remote.run(run) == await source.run(run)
            peer = source.nodes()[3].peer_id
            assert await remote.node(peer) == await source.node(peer)
            assert await remote.node("nobody") is None
            assert (await remote.series("nodes", 24.0)) == await source.series("nodes", 24.0)
            await asyncio.sleep(0)
            source.change(num_nodes=77)
            await until(remote, lambda: remote.overview().num_nodes == 77)
            assert remote.overview().stale is None

    asyncio.run(scene())


def test_lost_dashboard_leaves_the_last_views_marked_as_outdated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "POLL_S", 0.01)
    source = swarm(8)

    async def scene() -> None:
        async with dashboard(source) as url:
            context = following(url)
            remote = await context.__aenter__()
            await asyncio.sleep(0)
        try:
            await until(remote, lambda: bool(remote.overview().stale))
            assert str(remote.overview().stale).startswith("connection lost: no dashboard answers at http://127.0.0.1")
            assert remote.overview().num_nodes == 8
        finally:
            await context.__aexit__(None, None, None)

    asyncio.run(scene())


def answered(
    handler: Callable[[httpx.Request], httpx.Response], ask: Callable[[DashboardClient], Awaitable[Any]]
) -> Any:
    async def scene() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
            return await ask(DashboardClient(client, "http://swarm.example"))

    return asyncio.run(scene())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html>no</html>", "does not answer as a dashboard: Invalid JSON"),
        (b"{}", "does not answer as a dashboard: at: Field required"),
        (b'{"at": "soon"}', "does not answer as a dashboard: at: Input should be a valid number"),
        (b"[" * 100_000, "does not answer as a dashboard"),
        (b'{"num_nodes": 1%b}' % (b"0" * 400), "does not answer as a dashboard: it gives a number that is too large"),
    ],
)
def test_answer_that_is_no_view_is_refused_with_one_line(content: bytes, said: str) -> None:
    with pytest.raises(PeerViolation, match=said) as caught:
        answered(lambda _request: httpx.Response(200, content=content), DashboardClient.start)
    assert len(caught.value.message) <= 300
    assert "\n" not in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, "the server there has no Swarm dashboard"),
        *((status, f"the server answered with status {status}") for status in (403, 500, 503)),
    ],
)
def test_server_that_is_no_dashboard_is_named(status: int, said: str) -> None:
    with pytest.raises(PeerUnreachable, match=f"no dashboard answers at http://swarm.example: {said}"):
        answered(lambda _request: httpx.Response(status, content=b"x"), DashboardClient.start)


def failed(reason: BaseException) -> httpx.ConnectError:
    """Return a request's error as the library raises it, with the reason somewhere below."""
    error, below = httpx.ConnectError("All connection attempts failed"), OSError("All connection attempts failed")
    below.__cause__ = ExceptionGroup("several", [reason]) if isinstance(reason, Exception) else reason
    error.__context__ = below
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (failed(ConnectionRefusedError()), "the connection was refused; nothing listens at that address and port"),
        (failed(socket.gaierror(-2, "Name or service not known")), "the name server knows no such host"),
        (failed(ssl.SSLError(1, "WRONG_VERSION_NUMBER")), "TLS failed; if the server uses plain HTTP"),
        (httpx.ConnectTimeout(""), "the host does not answer"),
        (httpx.ReadTimeout(""), "the server there did not answer within 10 s"),
        (httpx.RemoteProtocolError("illegal status line"), "the server there does not speak HTTP"),
        (httpx.ConnectError("No route to host"), "No route to host"),
    ],
)
def test_reason_of_a_failed_connection_is_given_in_words(error: Exception, said: str) -> None:
    def fail(_request: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(PeerUnreachable, match=f"no dashboard answers at http://swarm.example: {said}") as caught:
        answered(fail, DashboardClient.start)
    assert "--url" in caught.value.remedy


def test_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(PeerViolation, match="sends more than 1000 bytes"):
        answered(lambda _request: httpx.Response(200, content=b"x" * 5000), DashboardClient.start)


def test_refusal_of_an_answer_has_no_terminal_codes() -> None:
    content = swarm(1).overview().model_dump(mode="json") | {"paths": {"\x1b]0;title\x07": "many"}}
    with pytest.raises(PeerViolation, match="does not answer as a dashboard: paths") as caught:
        answered(lambda _request: httpx.Response(200, json=content), DashboardClient.start)
    assert caught.value.message.isprintable()


def test_answer_that_drips_is_given_up_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "ASK_TIMEOUT_S", 0.2)

    async def drip(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.sleep(0.02)

    async def scene() -> None:
        async with (
            serving(drip, listen("127.0.0.1", 0), grace_s=0.0) as url,
            httpx.AsyncClient() as client,
            asyncio.timeout(WITHIN_S),
        ):
            await DashboardClient(client, url).start()

    with pytest.raises(PeerUnreachable, match="the server there did not answer within"):
        asyncio.run(scene())


def test_fields_that_a_newer_dashboard_adds_are_ignored() -> None:
    view = swarm(1).overview()
    content = view.model_dump_json().replace('{"at":', '{"tomorrow":[1],"at":', 1)

    async def ask(remote: DashboardClient) -> Any:
        await remote.start()
        return remote.overview()

    assert answered(lambda _request: httpx.Response(200, content=content), ask) == view


def test_names_are_encoded_and_cannot_leave_the_api() -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path.decode())
        return httpx.Response(404)

    for name in ("../../admin?x=1#y", "a b/c"):
        assert answered(handler, lambda remote, name=name: remote.run(name)) is None
    assert asked == ["/api/v1/runs/..%2F..%2Fadmin%3Fx%3D1%23y", "/api/v1/runs/a%20b%2Fc"]
