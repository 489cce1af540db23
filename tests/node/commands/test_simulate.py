"""Tests that `swarm-node simulate` writes two files, or one line that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swarm.simulation.report import Measurements, Report, report_of
from swarm.simulation.scenario import Scenario
from swarm_node import cli
from swarm_node.commands import simulate

SCENARIO = 'nodes = 5\nminutes = 1\nwarm_up_minutes = 2\n[churn]\nmodel = "trace"\ntrace = "sessions.csv"\n'


def test_simulate_writes_a_page_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.toml").write_text(SCENARIO)
    (tmp_path / "sessions.csv").write_text("0,30\n0,999\n0,999\n10,999\n")
    out = tmp_path / "report"
    assert cli.run(["simulate", str(tmp_path / "small.toml"), "--out", str(out), "--seed", "7", "--json"]) == 0
    event = json.loads(capsys.readouterr().out.splitlines()[-1])
    report = json.loads(Path(event["json"]).read_text())
    assert event["event"] == "simulation"
    assert report["scenario"]["seed"] == 7
    assert event["sections"] == report["sections"]
    assert Path(event["html"]).read_text().startswith("<!doctype html>")


def test_simulate_passes_on_the_number_of_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked_for = tmp_path / "small.toml", list[int]()

    def simulated(scenario: Scenario, *, processes: int, on_minute: object) -> Report:
        asked_for.append(processes)
        return report_of(scenario, Measurements(), processes)

    monkeypatch.setattr(simulate, "simulate", simulated)
    path.write_text("nodes = 5")
    for options in ([], ["--processes", "3"]):
        assert cli.run(["simulate", str(path), "--out", str(tmp_path / "report"), *options]) == 0
        told = "in 3 processes" if options else "in one process"
        assert f"simulating 5 nodes {told}\n" in capsys.readouterr().err
    assert asked_for == [1, 3]
    path.write_text("nodes = 5\n[[regions]]\nlatency_ms = 1")
    assert cli.run(["simulate", str(path), "--out", str(tmp_path / "report"), "--processes", "3"]) == 0
    assert (
        "simulating 5 nodes in one process, because the latency between some nodes is below 2 ms"
        in capsys.readouterr().err
    )
    assert cli.run(["simulate", str(path), "--processes", "0"]) != 0
    assert "--processes: '0'" in capsys.readouterr().err


def test_simulate_names_the_range_of_a_number_outside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.toml"
    path.write_text("nodes = 5")
    for options, remedy in ((["--processes", "100"], "use 1 to 16"), (["--seed", "-1"], "use 0 to 2147483647")):
        assert cli.run(["simulate", str(path), *options]) == 2
        assert remedy in capsys.readouterr().err


def test_simulate_refuses_a_missing_directory_before_it_simulates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.toml"
    path.write_text("nodes = 5")
    assert cli.run(["simulate", str(path), "--out", str(tmp_path / "nowhere" / "report")]) != 0
    error = capsys.readouterr().err
    assert "there is no directory" in error
    assert "minute 1" not in error


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_simulate_refuses_an_out_without_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str) -> None:
    (tmp_path / "small.toml").write_text("nodes = 5")
    assert cli.run(["simulate", str(tmp_path / "small.toml"), "--out", out]) == 2
    assert f"--out: {out!r} has no name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("", "is empty"),
        ("# nodes = 300\n", "is empty"),
        ("nodes = ", "is not valid TOML"),
        ("nodes = " + "1" * 5000, "is not valid TOML"),
        ("nodes = 0x" + "f" * 5000, "more than 64 bits"),
        ("nodes = " + "[" * 5000, "is nested too deeply"),
        ("nodes" + ".a" * 50 + " = 1", "dotted key"),
        (SCENARIO.replace("sessions.csv", "\\u0000"), "cannot read"),
        ("nods = 3", "unknown key 'nods'"),
        (SCENARIO, "cannot read"),
    ],
)
def test_simulate_of_a_bad_file_fails_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    path = tmp_path / "bad.toml"
    if text is not None:
        path.write_text(text)
    assert cli.run(["simulate", str(path)]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
