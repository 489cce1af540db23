"""The tutorials, typed as they are written, on loopback: every command works, and what runs goes on running.

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


class Learner:
    """Types what pages say into shells of one folder. Commands that last go on in the background."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {port: str(free_port()) for port in ("4001", "8000", "8001", "9401")}
        self._address = ""
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SWARM_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
        }

    def read(self, page: str, *, without: tuple[str, ...] = ()) -> None:
        """Do what the page says, section by section, those named in `without` left out."""
        for section in re.split(r"^## ", (DOCS / "tutorials" / page).read_text("utf-8"), flags=re.MULTILINE):
            if section.split("\n", 1)[0] in without:
                continue
            for language, block in re.findall(r"^```(\w+)\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE):
                if language == "sh":
                    for line in block.splitlines():
                        self.type(line)
                elif language == "python":
                    self._until_done([sys.executable, "-c", self._meant(block)], block)
                elif language == "toml":
                    self._edit(block)

    def type(self, line: str) -> None:
        if not LASTING.match(line):
            self._until_done(["bash", "-c", self._meant(line)], line)
            return
        if line in self._running and self._running[line].poll() is None:
            return
        print(f"$ {line} &")
        name = re.sub(r"\W+", "-", line)[:80]
        with (self._folder / f"{name}.log").open("ab") as log:
            command = ["bash", "-c", f"exec {self._meant(line)}"]
            self._running[line] = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        if " seed " in line:
            self._until_done(["swarm-node", "status", "--home", "seed"], "the seed starts")
            peer_id = self._run(["swarm-node", "identity", "--home", "seed"]).stdout.strip()
            self._address = f"/ip4/127.0.0.1/tcp/{self._ports['4001']}/p2p/{peer_id}"

    def ended(self) -> dict[str, int]:
        """The exit codes of those lasting commands that have ended."""
        return {line: code for line, process in self._running.items() if (code := process.poll()) is not None}

    def wait(self, word: str) -> list[int]:
        """The exit codes of those that `word` is in, once they have ended."""
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
        return text.replace("ADDR", self._address)

    def _edit(self, block: str) -> None:
        [path] = self._folder.glob("*.toml")
        text = path.read_text("utf-8")
        for line in block.splitlines():
            key = line.split(" = ")[0]
            text, num_changed = re.subn(rf"^{key} = .*$", line, text, count=1, flags=re.MULTILINE)
            assert num_changed, f"the run file has no {key}"
        path.write_text(text, "utf-8")

    def _until_done(self, command: list[str], shown: str) -> None:
        """Again and again until it works: people wait until what they have started is there."""
        if shown.startswith("make setup"):
            return
        print(f"$ {shown.splitlines()[0]}")
        is_demo = "swarm-node demo" in shown
        until_s = time.monotonic() + (DEMO_S if is_demo else OTHERS_S)
        while True:
            done = self._run(command)
            is_good = done.returncode == 0 and not done.stdout.startswith(('{"error"', '{"object":"list","data":[]'))
            # that the demo's own kill comes in time is its own tests' to show: a slow machine may be too late for it
            if is_good or is_demo:
                return
            assert time.monotonic() < until_s, f"{shown}\n{done.stdout}{done.stderr}"
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
    assert learner.ended() == {}, "the network is still there"
    learner.read("client.md")
    assert all("--home two" in line for line in learner.ended())
    learner.read("researcher.md")
    assert learner.wait("trainer") == [0, 0], "both members end by themselves, their work done"
