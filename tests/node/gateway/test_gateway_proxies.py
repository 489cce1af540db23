"""Visitors behind a proxy: told apart where the proxy is trusted, and nowhere else."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from node.gateway.scripted_client import ScriptedClient
from starlette.types import Receive, Scope, Send
from support.node_settings import resolve
from swarm_node.gateway.app import GatewayOptions, create_app
from swarm_node.http.addresses import TrustedProxies
from swarm_node.http.rate_limit import Rates
from swarm_node.http.server import listen, serving
from swarm_protocol.errors import ConfigError

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
def test_visitor_is_whom_a_trusted_proxy_names(client: str, headers: list[tuple[str, str]], visitor: str) -> None:
    seen: list[str] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope["client"][0])

    scope = {"type": "http", "client": (client, 1), "headers": [(n.encode(), v.encode()) for n, v in headers]}
    for trusted in (TRUSTED, ()):
        asyncio.run(TrustedProxies(app, trusted)(scope, None, None))  # type: ignore[arg-type]
    assert seen == [visitor, client], "without trusted proxies no header is believed"


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


def test_trusted_proxies_are_addresses_and_networks() -> None:
    given = resolve({"trusted_proxies": ["10.1.2.3/8", "::1"]}, env={}, file=None).trusted_proxies
    assert given == ("10.0.0.0/8", "::1/128")
    assert resolve({}, env={"SWARM_TRUSTED_PROXIES": "127.0.0.1,10.0.0.0/8"}, file=None).trusted_proxies
    for wrong in ("proxy.example.org", "10.0.0.0/40", "*"):
        with pytest.raises(ConfigError, match="address or network"):
            resolve({"trusted_proxies": [wrong]}, env={}, file=None)
