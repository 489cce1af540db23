"""Real `swarm-node` processes: started, read by their events, and ended whatever the test does."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.forked_node import ForkedNode
from swarm_node import cli
from swarm_node.events import event_contract

COMMAND = (str(Path(sys.executable).with_name("swarm-node")),)
START_S = 60.0  # imports take 2 s on an idle machine; this is for one that is not
Event = dict[str, object]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    return kept | {"OMP_NUM_THREADS": "1"} | more


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A command that has ended."""

    code: int
    events: list[Event]
    err: str
    seconds: float

    @property
    def error(self) -> str:
        """The error event as one text. Fails unless it is the only one, and stderr says the same in one line or two.

        It is the last word of a command, and the one before the last of a daemon.
        """
        [error] = [event for event in self.events if event["event"] == "error"]
        was_daemon = any(event["event"] == "step" for event in self.events)
        assert self.events[-1]["event"] == ("stopped" if was_daemon else "error")
        stopped = f"○ stopped: {self.events[-1]['reason']}\n" if was_daemon else ""
        assert self.err.endswith(f"error: {error['message']}\n  → {error['remedy']}\n{stopped}")
        assert "Traceback" not in self.err
        return f"{error['message']} → {error['remedy']}"


def run_node(*arguments: object, command: tuple[str, ...] = COMMAND, timeout_s: float = START_S) -> Answer:
    """Run a command with --json to its end; every event has to hold to the contract."""
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
    """`run_node` in this process, which has imported everything, for commands that end by themselves.

    Tests that use `run_node` show that a started program returns the same exit code.
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


def parsed(lines: list[str]) -> list[Event]:
    events = [json.loads(line) for line in lines]
    assert [problem for event in events for problem in event_contract.problems(event)] == []
    return events


class Node:
    """A daemon in a process of its own, a fork of another where that is asked for."""

    def __init__(
        self, *arguments: object, home: Path, command: tuple[str, ...] = COMMAND, is_forked: bool = False
    ) -> None:
        self.home = home
        self.events: list[Event] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self.err_path = home.with_name(f"{home.name}.err")
        given = [*map(str, arguments), "--home", str(home), "--json"]
        self.process: ForkedNode | subprocess.Popen[str]
        if is_forked:
            self.process = ForkedNode(given, environment=environment(), err_path=self.err_path)
        else:
            with self.err_path.open("w") as err:
                self.process = subprocess.Popen(
                    [*command, *given], env=environment(), stdout=subprocess.PIPE, stderr=err, text=True
                )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait_for(self, name: str, timeout_s: float = START_S) -> Event:
        """The next event of that name. Fails with what the node said if it ends or takes too long."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                line = ""
            if not line:
                raise AssertionError(f"no {name!r} from {self.home.name}: {self.events}\n{self.err_path.read_text()}")
            [event] = parsed([line])
            self.events.append(event)
            if event["event"] == name:
                return event

    @property
    def libp2p(self) -> psutil.Process:
        [child] = [child for child in psutil.Process(self.process.pid).children() if "p2pd" in child.name()]
        return child

    def wait_end(self, timeout_s: float = START_S) -> int:
        """The exit code; the remaining events are then in `events`."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        while line := self._lines.get(timeout=1):
            self.events += parsed([line])
        return code

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass(frozen=True, slots=True)
class Seed:
    node: Node
    peer_id: str
    addr: str


@pytest.fixture(scope="session")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seed]:
    """One seed for all tests that only need to join somewhere."""
    node = Node("seed", "--network-id", "tests", home=tmp_path_factory.mktemp("seed") / "home")
    try:
        ready = node.wait_for("ready")
        addrs = ready["addrs"]
        assert isinstance(addrs, list)
        yield Seed(node, str(ready["peer_id"]), addrs[0])
    finally:
        node.end()


@pytest.fixture(scope="session")
def member(seed: Seed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One node that has joined through the seed and stands by, for all tests that leave it alone."""
    home = tmp_path_factory.mktemp("member") / "home"
    join = ("join", "--take", "nothing", "--network-id", "tests", "--device", "cpu", "--probe", "off")
    node = Node(*join, "--peers", seed.addr, home=home)
    try:
        node.wait_for("ready")
        yield node
    finally:
        node.end()


StartNode = Callable[..., Node]


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    """Starts daemons, each with a home of its own name, and ends them after the test.

    Where `is_forked`, they share what torch and transformers take to import: for nodes that train or serve.
    """
    nodes: list[Node] = []

    def start(*arguments: object, home: str = "home", is_forked: bool = False) -> Node:
        nodes.append(Node(*arguments, home=tmp_path / home, is_forked=is_forked))
        return nodes[-1]

    yield start
    for node in nodes:
        node.end()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll `condition` until it holds; fail with `what` if that takes too long."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)
