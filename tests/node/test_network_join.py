"""Tests what a node says while it joins its network."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.network_entry import ClockError, NetworkEntry
from swarm.network.traffic import Traffic
from swarm_node.events.emitter import Emitter
from swarm_node.network_join import join_network
from swarm_node.settings.config import Config
from swarm_node.shutdown import Shutdown
from swarm_node.storage.home import Home


def test_clock_that_differs_from_that_of_one_peer_is_told_by_a_node_that_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = NetworkEntry(nearby=("peer",), clock_error=ClockError("the clock is 1 h behind", remedy="set it"))
    out = io.StringIO()

    async def create(*_: object) -> Any:
        return SimpleNamespace(entry=entry)

    monkeypatch.setattr(Libp2pNetwork, "create", create)

    async def main() -> None:
        role = cast("Any", SimpleNamespace(name="serve", relay=lambda _config: "auto"))
        emitter = Emitter(json=True, out=out, err=io.StringIO())
        config, home = Config(home=tmp_path), Home(tmp_path)
        network = await join_network(config, home, role, Traffic(), emitter, Shutdown(), on_nobody=lambda _: None)
        assert network is not None

    asyncio.run(main())
    [warning] = map(json.loads, out.getvalue().splitlines())
    assert warning["event"] == "warning"
    assert warning["message"] == "the clock is 1 h behind, unless that is wrong itself"
    assert warning["remedy"] == "set it"
