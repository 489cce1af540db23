"""A `swarm-node` daemon in a process of its own: started, read by its events, and ended."""

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
from collections.abc import Callable
from pathlib import Path

import psutil
from support.forked_node import Begin, ForkedNode
from swarm_node.events import emitter

COMMAND = (str(Path(sys.executable).with_name("swarm-node")),)
START_S = 120.0  # imports take 2 s on an idle machine; this is for one that is not
Event = dict[str, object]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def parsed(lines: list[str]) -> list[Event]:
    events = [json.loads(line) for line in lines]
    assert [problem for event in events for problem in emitter.problems(event)] == []
    return events


class Node:
    """A daemon in a process of its own. Where `is_forked`, it is a fork of one that has imported torch, and where
    `is_light`, of one that has imported what a node that does not compute needs; a fork calls `begin` first."""

    def __init__(
        self,
        *arguments: object,
        home: Path,
        command: tuple[str, ...] = COMMAND,
        is_forked: bool = False,
        is_light: bool = False,
        begin: Begin | None = None,
    ) -> None:
        self.home = home
        self.events: list[Event] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self.err_path = home.with_name(f"{home.name}.err")
        given = [*map(str, arguments), "--home", str(home), "--json"]
        self.process: ForkedNode | subprocess.Popen[str]
        if is_forked or is_light:
            self.process = ForkedNode(
                given, environment=environment(), err_path=self.err_path, begin=begin, computes=is_forked
            )
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
                self.process.wait(START_S)
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    """Poll `condition` until it holds; fail with `what` if that takes too long."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)
