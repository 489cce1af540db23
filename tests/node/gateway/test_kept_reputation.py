"""What a gateway knows of servers comes back after a restart; a file that is none costs the memory only."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm.trust.reputation import Reputation
from swarm_node.gateway.role import keep, reputation_in
from swarm_protocol.identity import Identity

PEER = Identity(bytes(range(32))).peer_id
NOW = 1_700_000_000.0


def test_reputation_comes_back_in_its_own_network_alone(tmp_path: Path) -> None:
    path = tmp_path / "reputation.json"
    known = Reputation()
    known.note(PEER, "failed", NOW)
    keep(known.to_dict(), path, "swarm")
    assert reputation_in(path, "swarm").for_routing([PEER], NOW, "").barred == {PEER}
    assert reputation_in(path, "other").standings == {}
    assert reputation_in(tmp_path / "none.json", "swarm").standings == {}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"network_id": "swarm", "servers": {"x": [1]}}', '{"network_id": "swarm", "servers": 7}']
)
def test_broken_file_costs_the_memory_only(tmp_path: Path, text: str) -> None:
    path = tmp_path / "reputation.json"
    path.write_text(text)
    assert reputation_in(path, "swarm").standings == {}
