"""Tests that `swarm-node simulate` writes two files, or one line that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swarm_node import cli

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


def test_simulate_names_the_range_of_a_seed_outside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.toml"
    path.write_text("nodes = 5")
    assert cli.run(["simulate", str(path), "--seed", "-1"]) == 2
    assert "use 0 to 2147483647" in capsys.readouterr().err


def test_simulate_refuses_a_missing_directory_before_it_simulates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.toml"
    path.write_text("nodes = 5")
    assert cli.run(["simulate", str(path), "--out", str(tmp_path / "nowhere" / "report")]) != 0
    error = capsys.readouterr().err
    assert "there is no directory" in error
    assert "minute 1" not in error


def test_simulate_of_a_file_for_plan_names_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text('[[nodes]]\nname = "attic"\nmemory = "24GiB"\n')
    assert cli.run(["simulate", str(path)]) == 1
    assert capsys.readouterr().err == (
        f"error: {path} lists nodes, as for swarm-node plan; in a scenario, nodes is their number\n"
        f"  → use swarm-node plan --nodes {path}, or write a scenario as in docs/guides/simulate.md\n"
    )


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
