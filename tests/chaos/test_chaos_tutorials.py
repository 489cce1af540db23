"""The tutorials, typed as they are written, on loopback: every command works and prints what its page shows, and what
runs goes on running.

    .venv/bin/python -m pytest tests/chaos/test_chaos_tutorials.py -m chaos -s

The lesson for volunteers leaves its network to those for operators and clients; the one for researchers uses its seed.
Only homes, ports and the seed's address differ from the pages.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.free_ports import free_port
from support.site_pages import DOCS

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

LASTING = re.compile(r"swarm-node (?:seed|join|gateway|dashboard|run watch)\b")
DEMO_S, OTHERS_S = 600.0, 180.0
UNITS_AND_NAMES = frozenset({"s", "ms", "min", "kB", "MB", "GB", "MiB", "GiB", "kbit/s", "Mbit/s", "vm"})


def as_pattern(line: str) -> str:
    """Return an expression for a line that a page shows. … stands for any text. Numbers, units, machine names and ends
    of peer ids may differ, but blocks such as 0:3 may not."""
    return r"\s+".join(map(_word_pattern, line.split()))


def _word_pattern(word: str) -> str:
    if re.fullmatch(r"\d+:\d+", word):
        return re.escape(word)
    if word in UNITS_AND_NAMES or re.search(r"\d", word):
        return r"\S+"
    if re.fullmatch(r"…\w{8}", word):
        return r"…\S+"
    return re.escape(word).replace("…", r"\S*")


class Learner:
    """Type the lines of pages into shells of one folder. Lasting commands go on in the background."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {port: str(free_port()) for port in ("4001", "8000", "8001", "9401")}
        self._address = self._pid = ""
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SWARM_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
        }

    def read(self, page: str, *, without: tuple[str, ...] = ()) -> None:
        """Follow the page, section by section, without the sections named in `without`."""
        for section in re.split(r"^## ", (DOCS / "tutorials" / page).read_text("utf-8"), flags=re.MULTILINE):
            if section.split("\n", 1)[0] in without:
                continue
            blocks = re.findall(r"^```(\w+)\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
            for (language, block), (next_language, shown) in zip(blocks, [*blocks, ("", "")][1:], strict=True):
                if language == "sh":
                    *lines, last = re.sub(r"\\\n *", "", block).splitlines()
                    for line in lines:
                        self.type(line)
                    self.type(last, shown=shown if next_language == "text" else "")
                elif language == "python":
                    self._until_done([sys.executable, "-c", self._meant(block)], block)
                elif language == "toml":
                    self._edit(block)

    def type(self, line: str, *, shown: str = "") -> None:
        """Type a line, and wait until it has printed the text that the page shows."""
        if not LASTING.match(line):
            self._until_done(["bash", "-c", self._meant(line)], line, shown)
            if drained := re.match(r"swarm-node drain (--home \w+)", line):
                self.wait(drained[1])  # its process ends a moment after its home is free
            return
        name = re.sub(r"\W+", "-", line)[:80]
        log_path = self._folder / f"{name}.log"
        if line not in self._running or self._running[line].poll() is not None:
            self._start(line, log_path)
        if shown:
            self._until_done(["cat", str(log_path)], f"what is shown of {line}", shown)

    def _start(self, line: str, log_path: Path) -> None:
        print(f"$ {line} &")
        with log_path.open("ab") as log:
            command = ["bash", "-c", f"exec {self._meant(line)}"]
            self._running[line] = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        if " seed " in line:
            self._until_done(["swarm-node", "status", "--home", "seed"], "the seed starts")
            peer_id = self._run(["swarm-node", "identity", "--home", "seed"]).stdout.strip()
            self._address = f"/ip4/127.0.0.1/tcp/{self._ports['4001']}/p2p/{peer_id}"

    def ended(self) -> dict[str, int]:
        """Return the exit codes of the lasting commands that have ended."""
        return {line: code for line, process in self._running.items() if (code := process.poll()) is not None}

    def wait(self, word: str) -> list[int]:
        """Wait for the lasting commands with `word` in their lines, and return their exit codes."""
        return [process.wait(OTHERS_S) for line, process in self._running.items() if word in line]

    def close(self) -> None:
        for process in self._running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._running.values():
            process.wait(60)

    def _meant(self, text: str) -> str:
        for port, free in self._ports.items():
            text = re.sub(rf"\b{port}\b", free, text)
        return text.replace("ADDR", self._address).replace("PID", self._pid)

    def _edit(self, block: str) -> None:
        [path] = self._folder.glob("*.toml")
        text = path.read_text("utf-8")
        for line in block.splitlines():
            key = line.split(" = ")[0]
            text, num_changed = re.subn(rf"^{key} = .*$", line, text, count=1, flags=re.MULTILINE)
            assert num_changed, f"the run file has no {key}"
        path.write_text(text, "utf-8")

    def _until_done(self, command: list[str], what: str, shown: str = "") -> None:
        """Repeat the command until it succeeds and prints `shown`, as a person waits until what they started is
        ready."""
        if what.startswith(("make setup", "pip install")):  # the test runs in what these lines make
            return
        print(f"$ {what.splitlines()[0]}")
        is_demo = "swarm-node demo" in what
        until_s = time.monotonic() + (DEMO_S if is_demo else OTHERS_S)
        while True:
            done = self._run(command)
            is_good = done.returncode == 0 and not done.stdout.startswith(('{"error"', '{"object":"list","data":[]'))
            # whether the demo's kill comes in time is left to the demo's tests: a slow machine may be too late
            printed = done.stdout + done.stderr
            lines = [line for line in shown.splitlines() if line != "…"]
            missing = [line for line in lines if not re.search(as_pattern(line), printed)]
            if (is_good and not missing) or is_demo:
                self._pid = next(iter(re.findall(r"\bpid (\d+)", printed)), self._pid)
                return
            assert time.monotonic() < until_s, f"{what}: {missing} is not in\n{printed}"
            time.sleep(1.0)

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEMO_S,
        )


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    learner = Learner(tmp_path)
    try:
        yield learner
    finally:
        learner.close()


def test_tutorials_work_as_they_are_written(learner: Learner) -> None:
    learner.read("volunteer.md", without=("Leave",))
    learner.read("operator.md")
    assert learner.ended() == {}, "a lasting command of the network ended"
    learner.read("client.md")
    ended = {re.findall(r"--home (\w+)", line)[0]: code for line, code in learner.ended().items()}
    assert ended == {"three": -signal.SIGKILL}, "the lesson kills the third server, and the answer goes on"
    learner.read("researcher.md")
    assert learner.wait("trainer") == [0, 0], "both members must end by themselves when the run is over"
