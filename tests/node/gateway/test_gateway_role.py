"""Tests of how a gateway starts: it listens before the node is ready, and is open to others only on purpose."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from node.gateway.scripted_client import ScriptedClient
from starlette.types import ASGIApp
from support.node_settings import resolve
from swarm_node.dashboard.app import DashboardRole
from swarm_node.gateway import http_limits, role
from swarm_node.gateway.app import create_app
from swarm_node.gateway.role import GatewayRole, options, pins
from swarm_node.http.rate_limit import Rates
from swarm_node.metrics.metric_registry import Registry
from swarm_node.metrics.otel_traces import NO_TRACES
from swarm_node.node import Activity, NodeRole
from swarm_node.settings.config import Config
from swarm_node.shutdown import Shutdown
from swarm_node.storage.client_models import used_in
from swarm_node.storage.home import Home
from swarm_protocol.errors import ConfigError, StartError


def _config(**more: object) -> Config:
    return Config(home=Path("/nowhere"), name="test", **more)  # type: ignore[arg-type]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text("anne key-of-anne-0123456789\n")
    return path


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "203.0.113.7"])
def test_gateway_that_others_can_reach_needs_keys_or_an_explicit_option(host: str, keys: Path) -> None:
    with pytest.raises(ConfigError, match="would need no key: give --api-keys FILE, or --open-to-all"):
        options(_config(host=host))
    assert options(_config(host=host, open_to_all=True)).rates == Rates(requests_per_min=http_limits.REQUESTS_PER_MIN)
    with_keys = options(_config(host=host, api_keys=keys, tokens_per_min=5))
    assert with_keys.keys is not None
    assert with_keys.rates == Rates(tokens_per_min=5)


def test_gateway_for_pages_of_all_origins_needs_keys_or_an_explicit_option(keys: Path) -> None:
    with pytest.raises(ConfigError, match="would need no key: name the pages' origins with --allowed-origins"):
        options(_config(allowed_origins=("*",)))
    for more in ({"allowed_origins": ("https://chat.example.org",)}, {"open_to_all": True}, {"api_keys": keys}):
        options(_config(**{"allowed_origins": ("*",), **more}))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_gateway_on_this_machine_alone_needs_no_keys(host: str) -> None:
    found = options(_config(host=host))
    assert found.keys is None
    assert found.rates == Rates()
    assert options(_config(host=host, requests_per_min=7)).rates == Rates(requests_per_min=7)


def test_invalid_host_is_refused() -> None:
    with pytest.raises(StartError, match="not an address of this machine"):
        options(_config(host="nobody.invalid"))


def test_port_is_bound_with_the_role_before_the_node_starts() -> None:
    bound = GatewayRole(_config(port=0))
    host, port = bound._listener.getsockname()
    with socket.create_connection((host, port), timeout=5), pytest.raises(StartError, match=f"port {port}"):
        GatewayRole(_config(port=port))
    bound._listener.close()


@pytest.mark.parametrize("role_class", [GatewayRole, DashboardRole])
def test_history_in_a_missing_directory_is_refused_before_the_node_starts(
    role_class: type[NodeRole], tmp_path: Path
) -> None:
    config = _config(port=0, history=str(tmp_path / "none" / "history.sqlite"))
    with pytest.raises(ConfigError, match=f"there is no directory {tmp_path}/none to keep the history in"):
        role_class(config)  # type: ignore[call-arg]


def test_missing_directory_for_text_at_home_is_refused_before_the_node_starts(tmp_path: Path) -> None:
    config = resolve({"port": "0", "text_at_home": [f"story={tmp_path}/none"]}, env={})
    with pytest.raises(ConfigError, match=f"^--text-at-home: there is no directory {tmp_path}/none to keep story from"):
        GatewayRole(config)


def test_pins_are_one_for_each_model() -> None:
    given = resolve({"pin_model": ["tiny@1a2b3c4d", "org/big@" + "5c819ed1" * 4]}, env={})
    assert pins(given) == {"tiny": "1a2b3c4d", "org/big": "5c819ed1" * 4}
    with pytest.raises(ConfigError, match="pinned twice"):
        pins(resolve({"pin_model": ["tiny@1a2b3c4d", "tiny@1a2b3c4e"]}, env={}))


def test_gateway_uses_its_pins_and_the_models_that_its_home_has_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    class Client(ScriptedClient):
        checks = SimpleNamespace(is_on=False)

        async def warm_up(self) -> None: ...

        async def aclose(self) -> None: ...

    def connected(**given: Any) -> Client:
        asked.append(given)
        return Client()

    monkeypatch.setattr(role, "AsyncClient", connected)
    config = resolve({"pin_model": ["tiny@1a2b3c4d"], "port": "0", "dashboard": "false"}, env={})

    async def main() -> None:
        node: Any = SimpleNamespace(
            config=config,
            home=Home(tmp_path),
            network=SimpleNamespace(network_id="net"),
            membership=None,
            metrics=Registry(),
            traces=NO_TRACES,
            activity=Activity(),
            steps=SimpleNamespace(done=lambda *_: None),
            emitter=SimpleNamespace(emit=lambda *_, **__: None),
            shutdown=Shutdown(),
        )
        node.shutdown.request("enough")
        await GatewayRole(config).run(node)

    used_in(Home(tmp_path).revisions, "net").add("tiny", "r")
    asyncio.run(main())
    options = asked[0]["options"]
    assert options.pins == {"tiny": "1a2b3c4d"}
    assert options.session.checks.share == 0.01, "a hundredth of the answers by default"
    assert list(options.used.of("tiny")) == ["r"]
    options.used.add("other", "s")
    assert list(used_in(Home(tmp_path).revisions, "net").of("other")) == ["s"]


def test_running_answers_get_the_grace_period_when_the_node_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve({"port": "0", "dashboard": "false", "drain_s": "70"}, env={})
    gateway, graces_s = GatewayRole(config), list[float]()

    @asynccontextmanager
    async def serving(
        _app: ASGIApp, listener: socket.socket, *, proxies: Sequence[str], grace_s: float
    ) -> AsyncIterator[str]:
        assert not proxies
        graces_s.append(grace_s)
        yield "http://127.0.0.1"
        listener.close()

    monkeypatch.setattr(role, "serving", serving)
    node: Any = MagicMock(config=config, shutdown=Shutdown())
    node.shutdown.request("enough")
    asyncio.run(gateway._serve(node, create_app(ScriptedClient())))
    assert graces_s == [70]


@pytest.mark.parametrize("text", ["tiny", "tiny@main", "tiny@1a2b3c4", "@1a2b3c4d5e", "tiny@1A2B3C4D5E"])
def test_pin_without_enough_of_a_revision_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not NAME@REVISION, with 8 or more of the revision's digits"):
        resolve({"pin_model": [text]}, env={})
