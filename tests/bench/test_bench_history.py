"""Thirty days of a thousand nodes in the dashboard's history: bytes on the disk, and the time that reading takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.history_month import check_month
from swarm_node.dashboard.history import recorder
from swarm_node.dashboard.history.retention import HOUR_S

pytestmark = pytest.mark.bench


@pytest.mark.timeout(600)  # a busy machine must not fail the bench
def test_thirty_days_of_a_thousand_nodes_stay_small_and_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "GAP_S", HOUR_S)
    check_month(tmp_path, num_nodes=1000)
