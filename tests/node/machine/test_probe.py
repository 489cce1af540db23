"""The hardware probe: it measures, remembers, and does not trust a damaged file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from swarm_node.machine import probe
from swarm_node.machine.hardware import Speeds
from swarm_protocol.errors import ConfigError


def test_examine_measures_once_and_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "BUDGET_S", 0.01)
    found = probe.examine("cpu", tmp_path, probe="auto", threads=0)
    assert found.speeds.prefill_tokens_per_s > 0
    assert found.speeds.decode_tokens_per_s > 0
    assert found.speeds.training_tokens_per_s > 0
    assert 0 < found.free_memory_bytes <= found.memory_bytes
    assert found.num_cores >= 1
    assert "prefill" in str(found)
    monkeypatch.setattr(probe, "measure", lambda device: pytest.fail("measured again"))
    assert probe.examine("cpu", tmp_path, probe="auto", threads=0).speeds == found.speeds


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"key": 1}', "not json"])
def test_examine_measures_again_when_the_stored_result_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    (tmp_path / "probe.json").write_text(damage)
    monkeypatch.setattr(probe, "measure", lambda device: Speeds(prefill_tokens_per_s=1.0))
    assert probe.examine("cpu", tmp_path, probe="auto", threads=0).speeds.prefill_tokens_per_s == 1
    assert json.loads((tmp_path / "probe.json").read_text())["speeds"]["prefill_tokens_per_s"] == 1


def test_examine_measures_again_when_the_stored_values_are_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "measure", lambda device: Speeds(prefill_tokens_per_s=1.0))
    probe.examine("cpu", tmp_path, probe="auto", threads=0)
    kept = json.loads((tmp_path / "probe.json").read_text())
    kept["speeds"]["prefill_tokens_per_s"] = -1
    (tmp_path / "probe.json").write_text(json.dumps(kept))
    assert probe.examine("cpu", tmp_path, probe="auto", threads=0).speeds.prefill_tokens_per_s == 1


def test_examine_says_when_a_stored_result_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe, "measure", lambda device: Speeds(prefill_tokens_per_s=1.0))
    caplog.set_level("INFO", "swarm_node.machine.probe")
    for num_told in (0, 1):
        probe.examine("cpu", tmp_path, probe="auto", threads=0)
        assert caplog.text.count("; --probe fresh measures again") == num_told


def test_examine_measures_when_fresh_and_never_when_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([Speeds(decode_tokens_per_s=1.0), Speeds(decode_tokens_per_s=2.0)])
    monkeypatch.setattr(probe, "measure", lambda device: next(speeds))
    for decode in (1, 2):
        assert probe.examine("cpu", tmp_path, probe="fresh", threads=0).speeds.decode_tokens_per_s == decode
    assert probe.examine("cpu", tmp_path, probe="off", threads=0).speeds == Speeds()


def test_measure_is_bounded_in_time() -> None:
    since = time.perf_counter()
    probe.measure("cpu")
    # three budgets, a warm-up and a last run each; generous, because others use the machine too
    assert time.perf_counter() - since < 3 * probe.BUDGET_S + 10


def test_choose_device_names_the_present_devices_when_the_given_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="there is no cuda device") as error:
        probe.choose_device("cuda")
    assert "cpu" in error.value.remedy
    assert probe.choose_device("cpu") == "cpu"
