"""A node keeps evidence about servers in its home, and reports it: event, status, `swarm-node evidence`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.wrong_possession import against, against_nobody
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet
from swarm.testing import virtual_time
from swarm_node import cli
from swarm_node.metrics.metric_registry import Registry
from swarm_node.node import Activity, Node
from swarm_node.roles.kept_convictions import kept_convictions
from swarm_node.storage.home import Home
from swarm_node.storage.server_evidence import convicted_servers, files_of_networks
from swarm_protocol import limits
from swarm_protocol.identity import Identity, short_id

LIAR = Identity(bytes([50]) * 32)


class Events(list[dict[str, Any]]):
    def emit(self, name: str, **fields: Any) -> None:
        self.append({"event": name, **fields})


def test_convicted_server_is_reported_shown_counted_and_kept_over_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events, registry = Events(), Registry()

    async def scenario() -> None:
        network = MemoryInternet().network()
        async with Membership(network) as membership:
            node = SimpleNamespace(
                network=network,
                membership=membership,
                home=Home(tmp_path),
                emitter=events,
                activity=Activity(),
                metrics=registry,
            )
            async with kept_convictions(cast("Node", node)) as held:
                assert node.activity.convicted_servers() == ()
                await held.take(against(LIAR, network.network_id, network.now()), network.peer_id)
                (shown,) = node.activity.convicted_servers()
                assert f"{short_id(LIAR.peer_id)} is not used until 20" in shown
                assert "signed a wrong proof that it holds weights of tiny" in shown
                assert b"swarm_node_num_convicted_servers 1.0" in registry.exposition()
            assert node.activity.convicted_servers() == ()
            async with kept_convictions(cast("Node", node)) as again:
                assert again.peers == {LIAR.peer_id}

    virtual_time.run(scenario())
    assert [(each["event"], each["peer_id"]) for each in events] == [("server_convicted", LIAR.peer_id)] * 2
    assert cli.run(["evidence", "list", "--home", str(tmp_path), "--json"]) == 0
    (told,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (told["event"], told["peer_id"], told["model"]) == ("convicted_server", LIAR.peer_id, "tiny")
    assert cli.run(["evidence", "verify", told["path"]]) == 0
    assert "lied: it signed a wrong proof that it holds weights of tiny" in capsys.readouterr().err


def test_file_that_convicts_nobody_is_reported_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convicted_servers(tmp_path, "test").keep(LIAR.peer_id, against_nobody(LIAR, "test", 1e9))
    (path,) = files_of_networks(tmp_path)
    assert cli.run(["evidence", "verify", str(path)]) == 1
    assert "proves nothing: the statement is correct" in capsys.readouterr().err


def test_folder_returns_its_network_s_evidence_and_removes_what_a_crash_left(tmp_path: Path) -> None:
    folder, data = convicted_servers(tmp_path / "here", "test"), against(LIAR, "test", 1e9)
    folder.keep(LIAR.peer_id, data)
    (kept,) = files_of_networks(tmp_path / "here")
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    (kept.parent / "broken.evidence").write_bytes(b"no evidence")
    assert folder.read() == [data]
    assert convicted_servers(tmp_path / "here", "another").read() == []
    half = kept.parent / f".{LIAR.peer_id}.evidence.partial"
    half.write_bytes(data[:10])
    folder.keep("another", data)
    assert not half.exists()
    folder.forget(LIAR.peer_id)
    assert sorted(path.name for path in kept.parent.iterdir()) == ["another.evidence", "broken.evidence"]


def test_evidence_of_another_network_displaces_none_and_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may lie in both with one key, and evidence of one network must not displace that of the other."""
    monkeypatch.setattr(limits, "MAX_SERVER_BANS", 4)
    full, here = convicted_servers(tmp_path, "another"), convicted_servers(tmp_path, "test")
    theirs, ours = against(LIAR, "another", 1e9), against(LIAR, "test", 1e9)
    for name in "ABCD":  # sorts before the liar's name
        full.keep(name, theirs)
    here.keep(LIAR.peer_id, ours)
    full.keep(LIAR.peer_id, theirs)
    assert here.read() == [ours]
    assert len(full.read()) == 4
    assert len(files_of_networks(tmp_path)) == 5
    here.forget(LIAR.peer_id)
    assert (here.read(), len(full.read())) == ([], 4)
