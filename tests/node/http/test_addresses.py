"""The host names that a server answers to, and the addresses of callers behind proxies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from node.gateway.scripted_client import ScriptedClient
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from support.node_settings import resolve
from swarm_node.dashboard import app
from swarm_node.dashboard.app import DashboardRole
from swarm_node.gateway.app import GatewayOptions, create_app
from swarm_node.gateway.role import GatewayRole
from swarm_node.http import addresses, server
from swarm_node.http.addresses import KnownHosts, Network, TrustedProxies
from swarm_node.http.rate_limit import Rates
from swarm_node.http.server import listen, serving
from swarm_node.metrics.exporter import serving_metrics
from swarm_node.metrics.metric_registry import Registry
from swarm_node.shutdown import Shutdown
from swarm_protocol.errors import ConfigError


def asked(host: str, *, listened: str = "127.0.0.1", allowed: str = "") -> httpx.Response:
    config = resolve({"host": listened, "allowed_hosts": [allowed] if allowed else None}, env={}, file=None)
    app = KnownHosts(PlainTextResponse("in"), config)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.get("/", headers={"host": host})

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "LOCALHOST:8000",
            "me.localhost:1",
            "127.0.0.1:8000",
            "[::1]:8000",
            "192.0.2.7",
            "[2001:db8::1]",
        ),
        *("gateway:8000", "attic.lan", "attic.lan.:80"),
    ],
)
def test_addresses_local_names_and_own_names_are_accepted(host: str) -> None:
    assert asked(host, listened="Attic.lan").text == "in"


@pytest.mark.parametrize(("listened", "status"), [("127.0.0.1", 421), ("0.0.0.0", 200)])
def test_metrics_on_loopback_refuse_strangers_names(listened: str, status: int) -> None:
    async def ask() -> tuple[int, int]:
        config = resolve({}, env={}, file=None)
        listener = listen(listened, 0)
        place = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        async with serving_metrics(Registry(), listener, config), httpx.AsyncClient() as client:
            under_name = await client.get(place, headers={"host": "evil.example"})
            return (await client.get(place)).status_code, under_name.status_code

    assert asyncio.run(ask()) == (200, status)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"),
        *("", ":8000", "[::1", "[evil.example]", "evil.example#localhost", "attic.lan.evil.example", "1.2.3"),
        *("localhost@evil.example", "evil.example/localhost", "evil.example?localhost", "localhost, evil.example"),
    ],
)
def test_strangers_names_are_refused_with_the_remedy(host: str) -> None:
    answer = asked(host, listened="attic.lan", allowed="swarm.example.org")
    assert answer.status_code == 421
    error = answer.json()["error"]
    assert "--allowed-hosts" in error["remedy"]
    assert len(answer.content) < 500


def test_long_and_strange_names_are_not_repeated_whole() -> None:
    answer = asked("x" * 5000 + ".example")
    assert answer.status_code == 421
    assert len(answer.content) < 500


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        ("Swarm.example.org", "swarm.example.org:443", 200),
        ("a.example.org, b.example.org", "b.example.org", 200),
        ("*.example.org", "b.example.org", 200),
        ("*.example.org", "example.org", 421),
        ("*.example.org", "c.b.example.org", 421),
        ("*.example.org", "evilexample.org", 421),
        ("*", "whatever.example", 200),
    ],
)
def test_configured_names_are_accepted(allowed: str, host: str, status: int) -> None:
    assert asked(host, allowed=allowed).status_code == status


@pytest.mark.parametrize(
    ("target", "host", "status", "answer"),
    [
        ("http://localhost:80/v1/a%20b?c=http://d", "evil.example", 200, "/v1/a b c=http://d"),
        ("http://127.0.0.1", "evil.example", 200, "/ "),
        ("http://evil.example/health", "localhost", 421, ""),
        ("http://[::1/health", "localhost", 200, "http://[::1/health "),
        ("*", "localhost", 200, "* "),
    ],
)
def test_target_that_names_the_host_is_answered_for_that_host(target: str, host: str, status: int, answer: str) -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(f"{scope['path']} {scope['query_string'].decode()}")(scope, receive, send)

    async def ask() -> str:
        known = KnownHosts(echo, resolve({}, env={}, file=None))
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        async with serving(known, listener):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
            said = (await reader.read()).decode()
            writer.close()
            return said

    said = asyncio.run(ask())
    assert said.startswith(f"HTTP/1.1 {status} ")
    assert said.endswith("\r\n\r\n" + answer) or not answer


def test_invalid_configured_name_is_refused(tmp_path: Path) -> None:
    for name in ("https://swarm.example.org", "swarm.example.org:443", "a/b", "*x.org", "-x.org"):
        with pytest.raises(ConfigError, match="is not a host name"):
            resolve({"allowed_hosts": [name]}, env={}, file=None)
    file = tmp_path / "config.toml"
    file.write_text('allowed_hosts = ["a.org"]')
    assert resolve({}, env={"SWARM_ALLOWED_HOSTS": "b.org c.org"}, file=file).allowed_hosts == ("b.org", "c.org")


TRUSTED = ("127.0.0.1/32", "::1/128", "10.0.0.0/8")
X = "x-forwarded-for"


@pytest.mark.parametrize(
    ("client", "headers", "visitor"),
    [
        ("203.0.113.9", [], "203.0.113.9"),
        ("203.0.113.9", [(X, "198.51.100.1")], "203.0.113.9"),
        ("192.168.0.7", [(X, "198.51.100.1")], "192.168.0.7"),
        ("127.0.0.1", [], "127.0.0.1"),
        ("127.0.0.1", [(X, "192.0.2.7, 198.51.100.1")], "198.51.100.1"),
        ("127.0.0.1", [(X, "192.0.2.7"), (X, "198.51.100.1")], "198.51.100.1"),
        ("::ffff:127.0.0.1", [(X, "198.51.100.1")], "198.51.100.1"),
        ("::1", [(X, "2001:db8::5")], "2001:db8::5"),
        ("10.0.0.3", [(X, "198.51.100.1, 10.1.2.3, 127.0.0.1")], "198.51.100.1"),
        ("10.0.0.3", [(X, "10.9.9.9, 10.1.2.3")], "10.9.9.9"),
        ("127.0.0.1", [(X, "198.51.100.1, nonsense")], "127.0.0.1"),
        ("127.0.0.1", [(X, "198.51.100.1, nonsense, 10.1.2.3")], "10.1.2.3"),
        ("127.0.0.1", [(X, "198.51.100.1:4711")], "198.51.100.1"),
        ("127.0.0.1", [(X, "[2001:db8::5]:4711")], "2001:db8::5"),
        ("127.0.0.1", [("forwarded", 'for=192.0.2.7;proto=http, proto=https;For="[2001:db8::5]:47"')], "2001:db8::5"),
        ("127.0.0.1", [("forwarded", "for=198.51.100.1;by=10.0.0.1")], "198.51.100.1"),
        ("127.0.0.1", [("forwarded", "for=198.51.100.1, for=unknown")], "127.0.0.1"),
        ("127.0.0.1", [("forwarded", 'host="a;for=192.0.2.7";for=198.51.100.1')], "198.51.100.1"),
        ("127.0.0.1", [("forwarded", 'for=198.51.100.1;host="a, for=192.0.2.7"')], "198.51.100.1"),
        ("127.0.0.1", [("forwarded", 'for=192.0.2.7;by="'), ("forwarded", "for=198.51.100.1")], "127.0.0.1"),
        ("127.0.0.1", [("forwarded", "proto=https")], "127.0.0.1"),
        ("127.0.0.1", [("forwarded", "f" * 60_000)], "127.0.0.1"),
        ("127.0.0.1", [("forwarded", "; " * 30_000)], "127.0.0.1"),
        ("127.0.0.1", [("forwarded", "for=198.51.100.1"), (X, "198.51.100.1")], "198.51.100.1"),
        ("127.0.0.1", [("forwarded", "for=192.0.2.7"), (X, "198.51.100.1")], "127.0.0.1"),
        ("127.0.0.1", [(X, "," * 5000)], "127.0.0.1"),
    ],
)
def test_visitor_is_the_address_that_a_trusted_proxy_names(
    client: str, headers: list[tuple[str, str]], visitor: str
) -> None:
    seen: list[str] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope["client"][0])

    scope = {"type": "http", "client": (client, 1), "headers": [(n.encode(), v.encode()) for n, v in headers]}
    for trusted in (TRUSTED, ()):
        asyncio.run(TrustedProxies(app, trusted)(scope, None, None))  # type: ignore[arg-type]
    assert seen == [visitor, client], "without trusted proxies no header counts"


@pytest.mark.parametrize(("trusted", "statuses"), [(["127.0.0.1"], [200, 200, 429]), ([], [200, 429, 429])])
def test_gateway_behind_a_proxy_limits_each_visitor_alone(trusted: list[str], statuses: list[int]) -> None:
    config = resolve({"trusted_proxies": trusted}, env={}, file=None)

    async def main() -> list[int]:
        app = create_app(ScriptedClient(), GatewayOptions(rates=Rates(requests_per_min=1)))
        proxied = TrustedProxies(app, config.trusted_proxies)
        async with serving(proxied, listen("127.0.0.1", 0)) as url, httpx.AsyncClient() as client:
            visitors = ("198.51.100.1", "198.51.100.2", "192.0.2.7, 198.51.100.1")
            return [(await client.get(f"{url}/v1/models", headers={X: visitor})).status_code for visitor in visitors]

    assert asyncio.run(main()) == statuses


class Echo:
    """Answers with the address that it is asked from, in place of a gateway or a dashboard."""

    state = SimpleNamespace(live=SimpleNamespace(close=lambda: None))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(scope["client"][0])(scope, receive, send)


@asynccontextmanager
async def no_collector(_node: object) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("kind", [GatewayRole, DashboardRole])
def test_gateways_and_dashboards_check_names_and_addresses(
    kind: type[GatewayRole | DashboardRole], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve({"trusted_proxies": ["127.0.0.1"], "port": "0"}, env={}, file=None)
    monkeypatch.setattr(app, "daemon_collector", no_collector)
    monkeypatch.setattr(app, "create_dashboard", lambda *_, **__: Echo())
    parties = list[str]()

    def party_at(host: str, port: int, proxies: Sequence[Network]) -> str:
        parties.append(addresses.party_at(host, port, proxies))
        return parties[-1]

    monkeypatch.setattr(server, "party_at", party_at)

    async def main() -> None:
        urls = asyncio.Queue[str]()
        node: Any = SimpleNamespace(
            config=config,
            activity=SimpleNamespace(state=""),
            steps=SimpleNamespace(done=lambda *_: None),
            emitter=SimpleNamespace(emit=lambda _event, url: urls.put_nowait(url)),
            shutdown=Shutdown(),
        )
        part = kind(config)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(part._serve(node, Echo()) if isinstance(part, GatewayRole) else part.run(node))
            url = await urls.get()
            async with httpx.AsyncClient() as client:
                assert (await client.get(url, headers={X: "198.51.100.1"})).text == "198.51.100.1"
                assert (await client.get(url, headers={"host": "evil.example"})).status_code == 421
                assert parties[0] != addresses.party_of("127.0.0.1"), "each connection of a proxy counts alone"
            node.shutdown.request("enough")

    asyncio.run(main())


def test_allowed_origins_are_as_browsers_write_them() -> None:
    given = resolve(
        {"allowed_origins": ["https://Chat.example.org:443/", "http://localhost:5173", "*"]}, env={}, file=None
    )
    assert given.allowed_origins == ("https://chat.example.org", "http://localhost:5173", "*")
    for wrong in ("chat.example.org", "https://a.org/page", "null", "https://me@a.org"):
        with pytest.raises(ConfigError, match="is not an"):
            resolve({"allowed_origins": [wrong]}, env={}, file=None)


def test_trusted_proxies_are_addresses_and_networks() -> None:
    given = resolve({"trusted_proxies": ["10.1.2.3/8", "::1"]}, env={}, file=None).trusted_proxies
    assert given == ("10.0.0.0/8", "::1/128")
    assert resolve({}, env={"SWARM_TRUSTED_PROXIES": "127.0.0.1,10.0.0.0/8"}, file=None).trusted_proxies
    for wrong in ("proxy.example.org", "10.0.0.0/40", "*"):
        with pytest.raises(ConfigError, match="address or network"):
            resolve({"trusted_proxies": [wrong]}, env={}, file=None)
