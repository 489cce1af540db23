"""A gateway's knowledge of servers returns after a restart; an invalid file costs only that knowledge."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from swarm.serving.checking.finished_answer import CheckReport
from swarm.trust.reputation import Reputation
from swarm_node.gateway.role import reputation_memory, spot_check_options
from swarm_node.metrics.metric_registry import Registry
from swarm_node.node import Node
from swarm_node.storage import server_evidence
from swarm_node.storage.home import Home
from swarm_protocol.identity import Identity
from swarm_protocol.served_evidence_messages import ServedEvidence

PEER = Identity(bytes(range(32))).peer_id
NOW = 1_700_000_000.0


def reputation_in(path: Path, network_id: str) -> Reputation | None:
    return reputation_memory(path, network_id).read(Reputation.from_dict)


def test_reputation_is_restored_only_in_its_own_network(tmp_path: Path) -> None:
    path = tmp_path / "reputation.json"
    known = Reputation()
    known.note(PEER, "failed", NOW)
    reputation_memory(path, "swarm").keep(known.to_dict())
    kept = reputation_in(path, "swarm")
    assert kept is not None
    assert kept.for_routing([PEER], NOW, "").barred == {PEER}
    assert reputation_in(path, "other") is None
    assert reputation_in(tmp_path / "none.json", "swarm") is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"network_id": "swarm", "servers": {"x": [1]}}', '{"network_id": "swarm", "servers": 7}']
)
def test_broken_file_costs_only_the_stored_reputation(tmp_path: Path, text: str) -> None:
    path = tmp_path / "reputation.json"
    path.write_text(text)
    assert reputation_in(path, "swarm") is None


def test_evidence_of_a_wrong_answer_is_kept_with_the_server_s_reputation(tmp_path: Path) -> None:
    node = SimpleNamespace(
        metrics=Registry(),
        home=Home(tmp_path),
        network=SimpleNamespace(network_id="swarm"),
        config=SimpleNamespace(spot_check=0.1),
    )
    evidence = ServedEvidence(commitment=b"signed", codec="raw", inputs=b"rows").to_bytes()
    with ThreadPoolExecutor(1) as writer:
        options = spot_check_options(cast("Node", node), writer)
        assert options.reputation is not None
        options.reputation.note(PEER, "failed", NOW)
        outcomes = ((PEER, "failed"),)
        options.on_report(
            CheckReport(peer_id=PEER, start=0, end=2, result="failed", named=PEER, outcomes=outcomes, evidence=evidence)  # type: ignore[arg-type]
        )
    assert [path.stem for path in server_evidence.answers_in(tmp_path / "served-evidence")] == [PEER]
    kept = reputation_in(tmp_path / "reputation.json", "swarm")
    assert kept is not None
    assert kept.for_routing([PEER], NOW, "").barred == {PEER}
