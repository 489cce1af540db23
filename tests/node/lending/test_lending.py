"""The month's traffic over restarts, and the breaks that follow from it and from the hours."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import datetime
from pathlib import Path

import pytest
from swarm.network.traffic import Traffic
from swarm_node.lending.lending import RESERVE, Lending, next_month, parse_window
from swarm_node.lending.traffic_count import MonthlyTraffic, keep_counting
from swarm_node.storage import home
from swarm_node.storage.home import replace_json

GB = 10**9


def _at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


NOW = _at("2026-11-23T12:00:00")


def _lending(path: Path, budget_bytes: int, *windows: str, at: float = NOW) -> tuple[Lending, Traffic]:
    traffic = Traffic()
    return Lending(tuple(map(parse_window, windows)), budget_bytes, MonthlyTraffic(path, at)), traffic


def test_month_is_counted_over_restarts_and_begins_anew_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    for _ in range(3):
        lending, traffic = _lending(path, 10 * GB)
        traffic.sent_in_turn("peer", 2 * GB)
        lending.month.update(traffic.total_bytes, NOW)
        traffic.received_in_turn("peer", GB)
        lending.month.update(traffic.total_bytes, NOW)
        lending.month.update(traffic.total_bytes, NOW)
        lending.month.save()
    assert lending.month.num_bytes == 9 * GB
    assert lending.break_at(NOW) is None
    traffic.sent_in_turn("peer", GB)
    later = _at("2026-12-01T00:00:01")
    lending.month.update(traffic.total_bytes, later)
    assert lending.month.num_bytes == GB
    assert _lending(path, 10 * GB, at=later)[0].month.num_bytes == 0


@pytest.mark.parametrize("wrong", ["1970-01-01T12:00:00", "2026-12-01T00:00:01", "2038-01-19T00:00:00"])
def test_month_is_not_counted_anew_when_the_clock_is_wrong_for_a_while(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "traffic.json"
    lending, traffic = _lending(path, 10 * GB)
    traffic.sent_in_turn("peer", 2 * GB)
    lending.month.update(traffic.total_bytes, NOW)
    lending.month.save()
    lending, traffic = _lending(path, 10 * GB, at=_at(wrong))
    traffic.sent_in_turn("peer", GB)
    lending.month.update(traffic.total_bytes, _at(wrong))
    lending.month.save()
    assert lending.month.num_bytes == GB
    traffic.sent_in_turn("peer", GB)
    lending.month.update(traffic.total_bytes, NOW)
    assert lending.month.num_bytes == 3 * GB
    lending.month.save()
    assert _lending(path, 10 * GB)[0].month.num_bytes == 3 * GB


def test_last_save_waits_for_the_running_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log = tmp_path / "traffic.json", list[str]()
    is_writing, may_write = threading.Event(), threading.Event()

    def write(where: Path, value: object) -> None:
        log.append("begins")
        is_writing.set()
        assert may_write.wait(10)
        replace_json(where, value)
        log.append("ends")

    monkeypatch.setattr(home, "replace_json", write)

    async def main() -> None:
        traffic = Traffic()
        month = MonthlyTraffic(path, NOW)
        counting = asyncio.create_task(keep_counting(month, traffic))
        await asyncio.to_thread(is_writing.wait, 10)
        traffic.sent_in_turn("peer", GB)
        threading.Timer(0.05, may_write.set).start()
        counting.cancel()
        await asyncio.wait((counting,))
        assert month.num_bytes == GB

    asyncio.run(main())
    assert log == ["begins", "ends"] * 2
    assert list(json.loads(path.read_text())["months"].values()) == [GB]


def test_only_the_last_months_are_kept(tmp_path: Path) -> None:
    lending, traffic = _lending(tmp_path / "traffic.json", 10 * GB)
    traffic.sent_in_turn("peer", GB)
    for year in range(2000, 2026):
        lending.month.update(traffic.total_bytes, NOW)
        lending.month.update(traffic.total_bytes, _at(f"{year}-01-01T12:00:00"))
        lending.month.save()
    assert _lending(tmp_path / "traffic.json", 10 * GB)[0].month.num_bytes == GB


def test_node_stops_near_the_end_of_its_budget_until_the_next_month(tmp_path: Path) -> None:
    lending, traffic = _lending(tmp_path / "traffic.json", 10 * GB)
    traffic.sent_in_turn("peer", int((1 - RESERVE) * 10 * GB) - 1)
    lending.month.update(traffic.total_bytes, NOW)
    assert lending.break_at(NOW) is None
    traffic.sent_in_turn("peer", 1)
    lending.month.update(traffic.total_bytes, NOW)
    pause = lending.break_at(NOW)
    assert pause is not None
    assert (pause.pause, pause.until) == ("budget", _at("2026-12-01T00:00:00"))
    assert pause.words(NOW) == "its monthly traffic is nearly used up: lends again at 00:00 on 01 December"


def test_used_up_budget_ends_in_the_first_hours_of_the_next_month_in_which_the_node_lends(tmp_path: Path) -> None:
    lending, traffic = _lending(tmp_path / "traffic.json", GB, "09:00-17:00")
    traffic.sent_in_turn("peer", GB)
    lending.month.update(traffic.total_bytes, NOW)
    pause = lending.break_at(NOW)
    assert pause is not None
    assert pause.until == _at("2026-12-01T09:00:00")


def test_node_has_a_break_outside_its_hours(tmp_path: Path) -> None:
    lending, _ = _lending(tmp_path / "traffic.json", 0, "22:00-07:00")
    pause = lending.break_at(NOW)
    assert pause is not None
    assert pause.words(NOW) == "outside its lending hours: lends again at 22:00"
    assert lending.break_at(_at("2026-11-23T23:00:00")) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"unit": "byte"}',
        '{"unit": "byte", "months": 7}',
        '{"unit": "byte", "months": {"2026-11": -1}}',
        '{"unit": "byte", "months": {"2026-11": "many"}}',
        '{"unit": "byte", "months": {"2026-11": 1e400}}',
        '{"unit": "byte", "months": {"2026-11": 1, "a": 1, "b": 1, "c": 1}}',
        json.dumps({"unit": "byte", "months": {"2026-11": 2**61}}),
        "{" * 2000,
    ],
)
def test_broken_file_is_counted_anew_with_a_warning(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "traffic.json").write_text(text)
    assert MonthlyTraffic(tmp_path / "traffic.json", NOW).num_bytes == 0
    assert "the month's traffic is lost" in caplog.text


def test_failing_disk_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    MonthlyTraffic(tmp_path / "nowhere" / "traffic.json", NOW).save()
    assert "the month's traffic" in caplog.text


def test_next_month_of_december_is_january() -> None:
    assert next_month(_at("2026-12-31T23:59:59")) == _at("2027-01-01T00:00:00")
    assert next_month(_at("2026-01-31T00:00:00")) == _at("2026-02-01T00:00:00")
