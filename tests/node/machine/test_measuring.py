"""A machine that was busy when it was measured is measured again when its node is idle."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.node_settings import resolve
from swarm.testing import virtual_time
from swarm_node import daemon
from swarm_node.events.emitter import Emitter
from swarm_node.machine import probe
from swarm_node.machine.hardware import Hardware, Speeds
from swarm_node.node import Activity, Node
from swarm_node.roles.seed import SeedRole
from swarm_node.shutdown import Shutdown
from swarm_node.storage.home import Home
from swarm_protocol.control_messages import ServingStatus, TrainingStatus
from swarm_protocol.identity import Identity

SLOW = Speeds(prefill_tokens_per_s=60.0, decode_tokens_per_s=42.0, training_tokens_per_s=5000.0)
FAST = Speeds(prefill_tokens_per_s=9000.0, decode_tokens_per_s=1890.0, training_tokens_per_s=4000.0)
BEST = Speeds(prefill_tokens_per_s=9000.0, decode_tokens_per_s=1890.0, training_tokens_per_s=5000.0)


def node_of(folder: Path) -> Any:
    """Return a stand-in for the parts of a node that measuring needs."""
    announced: list[Speeds] = []

    async def announce() -> None:
        announced.append(node.hardware.speeds)

    node = SimpleNamespace(
        activity=Activity(),
        announce=announce,
        announced=announced,
        config=SimpleNamespace(threads=1),
        shutdown=Shutdown(),
        hardware=Hardware.of("cpu", "any", lambda: (1, 1), SLOW),
        home=SimpleNamespace(cache=folder),
    )
    return node


@pytest.mark.parametrize("drawn", [1.0, 1.5, 2.0])
def test_idle_node_announces_the_better_measurement(
    drawn: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(_node: object) -> Speeds:
        return FAST

    async def scenario() -> None:
        node = node_of(tmp_path)
        node.activity.training = TrainingStatus(run="r", outer_step=1, num_outer_steps=2, loss=None, tokens_per_s=1.0)
        task = asyncio.create_task(probe.keep_measuring(node))
        await asyncio.sleep(9.5 * probe.FIRST_S)
        assert node.announced == [], "it trains"
        node.activity.training = None
        await asyncio.sleep(2 * probe.FIRST_S)
        assert node.announced == [FAST]
        await asyncio.sleep(probe.AGAIN_S - 2 * probe.FIRST_S)
        assert node.announced == [FAST], "the last measurement was not long ago"
        await asyncio.sleep(probe.AGAIN_S + 2 * probe.FIRST_S)
        assert len(node.announced) > 1
        task.cancel()

    monkeypatch.setattr(probe, "measured_apart", measured)
    monkeypatch.setattr("random.uniform", lambda _low, _high: drawn)
    virtual_time.run(scenario())


@pytest.mark.parametrize(("num_sessions", "tokens_per_s", "idle"), [(0, 0.0, True), (1, 0.0, False), (0, 3.0, False)])
def test_server_is_idle_while_it_answers_no_request(
    tmp_path: Path, num_sessions: int, tokens_per_s: float, idle: bool
) -> None:
    node = node_of(tmp_path)
    node.activity.serving = ServingStatus(
        model="m", start=0, end=1, num_sessions=num_sessions, tokens_per_s=tokens_per_s
    )
    assert probe.is_idle(node) is idle


def test_better_measurement_is_kept_when_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found, told in ((SLOW, SLOW), (FAST, BEST), (SLOW, BEST)):
        monkeypatch.setattr(probe, "measure", lambda _device, found=found: found)
        assert probe.measure_again("cpu", tmp_path, 0) == told
    assert probe.examine("cpu", tmp_path, probe="auto", threads=0).speeds == BEST


def test_measurement_runs_in_a_separate_process(tmp_path: Path) -> None:
    speeds = asyncio.run(probe.measured_apart(node_of(tmp_path)))
    assert speeds is not None
    assert min(speeds.prefill_tokens_per_s, speeds.decode_tokens_per_s, speeds.training_tokens_per_s) > 0
    assert (
        json.loads((tmp_path / "probe.json").read_text())["speeds"]["decode_tokens_per_s"] == speeds.decode_tokens_per_s
    )


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise RuntimeError('no memory is left')", "RuntimeError: no memory is left"),
        ("print('a library says hello')", "Expecting value: line 1 column 1"),
        ("print('[]')", "argument after ** must be a mapping"),
        ("""print('{"prefill_tokens_per_s": -1}')""", "-1 is not a speed"),
    ],
)
def test_process_that_fails_or_returns_invalid_values_is_no_measurement(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe, "_PROGRAM", program)
    assert asyncio.run(probe.measured_apart(node_of(tmp_path))) is None
    [line] = caplog.messages
    assert line.startswith("the machine's speed could not be measured again: ")
    assert reason in line


def test_process_that_cannot_be_started_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe.sys, "executable", str(tmp_path / "gone"))
    assert asyncio.run(probe.measured_apart(node_of(tmp_path))) is None
    assert "could not be measured again: no such file or directory" in caplog.text


class Looks(SeedRole):
    """A role that computes, alone in its network, and ends once its node has arrived."""

    computes = True

    async def run(self, node: Node) -> None:
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(("probe_flag", "num_measured"), [("auto", 1), ("off", 0)])
def test_daemon_measures_again_unless_the_setting_forbids_it(
    probe_flag: str, num_measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Node] = []

    async def measuring_node(node: Node) -> None:
        measured.append(node)

    async def machine(*_: object) -> Hardware:
        return Hardware.of("cpu", "any", lambda: (1, 1), SLOW)

    monkeypatch.setattr(probe, "keep_measuring", measuring_node)
    monkeypatch.setattr(daemon, "_machine", machine)
    home = Home(tmp_path / "home")
    home.create()
    Identity.generate().save(home.identity)
    config = resolve({"home": str(home.path), "probe": probe_flag, "network_id": "net", "mdns": "false"}, env={})
    emitter = Emitter(json=True, out=io.StringIO(), err=io.StringIO())
    asyncio.run(daemon._live(config, home, emitter, Looks(config), Shutdown()))
    assert len(measured) == num_measured
