"""`swarm-node top` as a process: over a real seed, for programs, for pipes, and on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import time

import pytest
from support.node_process import COMMAND, START_S, Node, environment
from swarm_node import cli
from swarm_node.dashboard.views import Overview

from .conftest import RunHere, Seed


def test_top_through_a_seed_prints_a_dashboard_s_views_for_programs(
    seed: Seed, member: Node, run_here: RunHere
) -> None:
    answer = run_here("top", "--network-id", "tests", "--peers", seed.addr)
    [event] = answer.events
    view = Overview.model_validate(event["overview"])
    assert (answer.code, event["event"], view.network_id) == (0, "overview", "tests")
    assert view.num_nodes >= 2, "the seed and the member, and perhaps some that were killed a moment ago"


@pytest.mark.usefixtures("run_here")  # which undoes what a command changes
def test_top_in_a_pipe_prints_its_picture_once(seed: Seed, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["top", "--network-id", "tests", "--peers", seed.addr]) == 0
    told = capfd.readouterr()
    assert told.out.startswith("network tests · version ")
    assert "\x1b" not in told.out
    assert told.err == "joining the network tests\n"


def test_top_on_a_terminal_is_live_until_q(seed: Seed) -> None:
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "top", "--network-id", "tests", "--peers", seed.addr],
        env=environment(TERM="xterm-256color", COLUMNS="100", LINES="30"),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        assert "JOIN" in read_until(main, "JOIN")
        os.write(main, b"q")
        rest = read_until(main, "\x1b[?1049l")  # the terminal is as it was
        assert process.wait(START_S) == 0
        assert "Traceback" not in rest
    finally:
        process.kill()
        process.wait()
        os.close(main)


def read_until(descriptor: int, text: str) -> str:
    """Return what was read until `text`. Fails if it does not come."""
    seen, until = "", time.monotonic() + START_S
    while text not in seen:
        assert time.monotonic() < until, seen[-2000:]
        seen += os.read(descriptor, 65536).decode("utf-8", "replace")
    return seen
