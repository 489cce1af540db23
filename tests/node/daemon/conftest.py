"""Real `swarm-node` processes that tests share, and commands that end by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.forked_node import Begin
from support.node_process import COMMAND, START_S, Event, Node, environment, parsed
from swarm_node import cli

STAND_BY = (
    *("join", "--take", "nothing", "--network-id", "tests", "--device", "cpu", "--probe", "off"),
    *("--max-upload", "20mbit", "--monthly-traffic", "500GB", "--hours", "00:00-24:00"),
)
"""A node that does nothing, with limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The output of a command that has ended."""

    code: int
    events: list[Event]
    err: str
    seconds: float

    @property
    def error(self) -> str:
        """Return the error event as one text.

        Fails unless it is the only one and stderr says the same in one or two lines. It is a command's last event, and
        a daemon's last but one.
        """
        [error] = [event for event in self.events if event["event"] == "error"]
        was_daemon = any(event["event"] == "step" for event in self.events)
        assert self.events[-1]["event"] == ("stopped" if was_daemon else "error")
        stopped = f"○ stopped: {self.events[-1]['reason']}\n" if was_daemon else ""
        assert self.err.endswith(f"error: {error['message']}\n  → {error['remedy']}\n{stopped}")
        assert "Traceback" not in self.err
        return f"{error['message']} → {error['remedy']}"


def run_node(*arguments: object, command: tuple[str, ...] = COMMAND, timeout_s: float = START_S) -> Answer:
    """Run a command with --json to its end. Every event must follow the contract."""
    since = time.monotonic()
    done = subprocess.run(
        [*command, *map(str, arguments), "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    seconds = time.monotonic() - since
    return Answer(code=done.returncode, events=parsed(done.stdout.splitlines()), err=done.stderr, seconds=seconds)


RunHere = Callable[..., Answer]


@pytest.fixture
def run_here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[RunHere]:
    """Do as `run_node` in this process, which has imported everything, for commands that end by themselves.

    Tests of `run_node` show that a started program returns the same exit code.
    """
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)
    on_interrupt = signal.getsignal(signal.SIGINT)

    def run(*arguments: object) -> Answer:
        capfd.readouterr()
        since = time.monotonic()
        code = cli.run([*map(str, arguments), "--json"])
        seconds = time.monotonic() - since
        told = capfd.readouterr()
        return Answer(code=code, events=parsed(told.out.splitlines()), err=told.err, seconds=seconds)

    yield run
    signal.signal(signal.SIGINT, on_interrupt)


@dataclass(frozen=True, slots=True)
class Seed:
    node: Node
    peer_id: str
    addr: str


@pytest.fixture(scope="session")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seed]:
    """Start one seed for all tests that only need to join somewhere."""
    home = tmp_path_factory.mktemp("seed") / "home"
    node = Node("seed", "--network-id", "tests", home=home, is_light=True)
    try:
        ready = node.wait_for("ready")
        addrs = ready["addrs"]
        assert isinstance(addrs, list)
        yield Seed(node, str(ready["peer_id"]), addrs[0])
    finally:
        node.end()


@pytest.fixture(scope="session")
def member(seed: Seed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Start one node with limits that has joined through the seed and has no work, for tests that do not change it."""
    home = tmp_path_factory.mktemp("member") / "home"
    node = Node(*STAND_BY, "--peers", seed.addr, home=home, is_light=True)
    try:
        node.wait_for("ready")
        yield node
    finally:
        node.end()


StartNode = Callable[..., Node]


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    """Start daemons, each with a home of its name, and end them after the test.

    If `is_forked`, they share the imports of torch and transformers, for nodes that train or serve. If `is_light`, they
    share what any node imports.
    """
    nodes: list[Node] = []

    def start(
        *arguments: object,
        home: str = "home",
        is_forked: bool = False,
        is_light: bool = False,
        begin: Begin | None = None,
    ) -> Node:
        nodes.append(Node(*arguments, home=tmp_path / home, is_forked=is_forked, is_light=is_light, begin=begin))
        return nodes[-1]

    yield start
    for node in nodes:
        node.end()
