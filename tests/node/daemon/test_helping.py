"""Volunteers that were given no work, as processes: they find some, say why they took it, and do it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.local_hub import local_hub
from support.tiny_models import FAMILIES, write_model

from .conftest import Node, StartNode
from .test_volunteers import named, written_run

JOIN = ("join", "--network-id", "helping", "--probe", "off", "--device", "cpu", "--threads", "1")


@pytest.fixture
def lone_seed(start_node: StartNode) -> str:
    """A network of its own: in that of all tests there would be work."""
    [addr] = start_node("seed", "--network-id", "helping", home="seed").wait_for("ready")["addrs"]  # type: ignore[misc]
    return str(addr)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with local_hub(write_model(tmp_path / "made", FAMILIES["llama"]()), tmp_path / "hub") as found:
        monkeypatch.setenv("HF_ENDPOINT", found.endpoint)
        yield


def step(node: Node, title: str) -> str:
    while (event := node.wait_for("step", timeout_s=100))["title"] != title:
        pass
    return str(event["detail"])


@pytest.mark.timeout(240)
def test_join_alone_waits_then_trains_the_run_that_comes(lone_seed: str, start_node: StartNode, tmp_path: Path) -> None:
    helper = start_node(*JOIN, "--peers", lone_seed, home="helper")
    assert "nobody serves a model or trains a run" in str(helper.wait_for("waiting")["reason"])
    mapped = {each.path for each in psutil.Process(helper.process.pid).memory_maps()}
    assert not [path for path in mapped if "libtorch" in path], "a node that waits does without"
    run = written_run(tmp_path, outer_steps=2)
    member = start_node(*JOIN, "--peers", lone_seed, "--run", run, home="member", is_forked=True)
    assert step(helper, "looks").endswith("has only 1 member")
    finished = [node.wait_for("run_finished", timeout_s=100) for node in (helper, member)]
    assert finished[0]["digest"] == finished[1]["digest"]
    assert named(helper, "outer_step")
    assert "it is finished here" in str(helper.wait_for("waiting", timeout_s=100)["reason"])
    helper.process.send_signal(signal.SIGTERM)
    assert helper.wait_end() == 0


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("hub")
def test_join_alone_serves_the_blocks_that_nobody_has(lone_seed: str, start_node: StartNode) -> None:
    model = ("--model", "someone/tiny", "--dtype", "bfloat16", "--blocks", "0:4")
    server = start_node(*JOIN, "--peers", lone_seed, *model, home="server", is_forked=True)
    told = server.wait_for("serving", timeout_s=100)
    helper = start_node(*JOIN, "--peers", lone_seed, home="helper", is_forked=True)
    assert step(helper, "looks") == "2 of the 6 blocks of tiny have no server"
    serving = helper.wait_for("serving", timeout_s=100)
    assert serving["start"] <= 4  # type: ignore[operator]
    assert serving["end"] == 6
    assert serving["revision"] == told["revision"], "the same commit in the same dtype"
    helper.process.send_signal(signal.SIGTERM)
    assert helper.wait_end() == 0
