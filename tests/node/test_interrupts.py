"""Ctrl-C from the first import to the command's own handling, in separate processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import swarm_node
from swarm_node import interrupts
from swarm_protocol.identity import Identity

END_S = 120.0
ADDR = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
SWALLOWING = """
import time
print("importing", flush=True)
try:
    time.sleep(30)
except BaseException:
    print("swallowed", flush=True)
"""
LOADING = """
print("importing", flush=True)
sum(range(10**13))  # for hours, in which no Python code runs, as in the initialization of a native library
"""
MEETS_CTRL_C = re.compile(r"asyncio\.run\(|asyncio\.Runner\(|with Client\(")
"""A loop of asyncio, or a client that has a thread to end."""


@pytest.fixture
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("library", "code", "arguments"),
    [
        ("typer", SWALLOWING, ["--help"]),
        ("typer", LOADING, ["--help"]),
        ("numpy", SWALLOWING, ["chat", "story", "--peers", ADDR]),
    ],
)
def test_ctrl_c_while_a_library_is_imported_ends_the_process_without_output(
    library: str, code: str, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / f"{library}.py").write_text(code)
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm_node", *arguments, "--home", str(tmp_path / "home")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))},
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=END_S) == ("", "")
        finally:
            process.kill()  # the end of `with` waits for it, also after a failed assertion
    assert 128 - process.returncode == interrupts.EXIT_INTERRUPTED  # as a shell reports an end by a signal


def test_nothing_is_loaded_before_ctrl_c_is_handled() -> None:
    code = "import sys; first = set(sys.modules); import swarm_node.__main__; print(*sorted(set(sys.modules) - first))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["swarm_node", "swarm_node.__main__", "swarm_node.interrupts"]


@pytest.mark.usefixtures("restored")
def test_ctrl_c_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.end_process()
    interrupts.raise_in_command()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.usefixtures("restored")
def test_ctrl_c_after_the_imports_cancels_the_loop_s_main_task() -> None:
    cancelled = False

    async def main() -> None:
        nonlocal cancelled
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(END_S)
        except asyncio.CancelledError:
            cancelled = True
            raise

    interrupts.end_process()
    interrupts.raise_in_command()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert cancelled


def test_each_command_that_holds_resources_lets_ctrl_c_raise() -> None:
    (folder,) = swarm_node.__path__
    sources = {str(path): path.read_text() for path in Path(folder).rglob("*.py")}
    meeting = {name for name, source in sources.items() if MEETS_CTRL_C.search(source)}
    assert len(meeting) >= 9
    told = ("interrupts.raise_in_command()", "diagnostics.begin_work()")
    assert {name for name in meeting if not any(call in sources[name] for call in told)} == set()
