"""The size of the dashboard's history, in a real file and virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.history_month import START, check_month, commit, tidy
from swarm_node.dashboard.history import reader, recorder
from swarm_node.dashboard.history.recorder import FactRecorder, PresenceFact
from swarm_node.dashboard.history.retention import HOUR_S, Retention, RetentionLimits
from swarm_node.dashboard.history.store import open_store
from swarm_node.formatting import DAY_S


@pytest.fixture(autouse=True)
def _far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "GAP_S", HOUR_S)


def test_thirty_days_of_nodes_that_come_and_go_stay_small_and_fast(tmp_path: Path) -> None:
    """`make bench` has it with a thousand nodes."""
    check_month(tmp_path, num_nodes=70)


def test_history_over_its_size_limit_shortens_all_ages_until_it_fits(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite3"
    limits = RetentionLimits(max_bytes=2**20)
    store, _ = open_store(file)
    writing, retention = FactRecorder(limits), Retention(store, limits)
    num_days = 12
    for hour in range(24 * num_days):
        began = START + hour * HOUR_S
        # hundreds of strangers, each present for half an hour
        strangers = frozenset(f"stranger-{hour}-{number}" for number in range(100))
        commit(store, writing, [PresenceFact(began, strangers), PresenceFact(began + 1800, frozenset())])
        if hour % 6 == 5:
            tidy(retention, began + HOUR_S)
    now = START + num_days * DAY_S
    for _ in range(3):
        tidy(retention, now)
    assert retention.squeeze > 0
    assert store.used_bytes() <= limits.max_bytes
    assert file.stat().st_size <= limits.max_bytes * 1.25
    with store.reading(60.0) as connection:
        # the newest rows are left
        assert reader.read_presence(connection, f"stranger-{24 * num_days - 1}-0", START)
        assert not reader.read_presence(connection, "stranger-0-0", START)
    store.close()
