"""Which names a server answers to: a stranger's page that leads its own name here is refused in words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from support.node_settings import resolve
from swarm_node.http.addresses import KnownHosts
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
def test_addresses_names_of_the_neighbourhood_and_its_own_are_let_in(host: str) -> None:
    assert asked(host, listened="Attic.lan").text == "in"


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
def test_names_that_are_given_are_let_in(allowed: str, host: str, status: int) -> None:
    assert asked(host, allowed=allowed).status_code == status


def test_what_is_no_name_cannot_be_given(tmp_path: Path) -> None:
    for name in ("https://swarm.example.org", "swarm.example.org:443", "a/b", "*x.org", "-x.org"):
        with pytest.raises(ConfigError, match="is not a host name"):
            resolve({"allowed_hosts": [name]}, env={}, file=None)
    file = tmp_path / "config.toml"
    file.write_text('allowed_hosts = ["a.org"]')
    assert resolve({}, env={"SWARM_ALLOWED_HOSTS": "b.org c.org"}, file=file).allowed_hosts == ("b.org", "c.org")
