"""A node whose starter dies: told by the end of its stdin, and ended by force if it is stuck."""

from __future__ import annotations

import os
import subprocess
import sys

STUCK = """
import os, time
from swarm_node import tether
tether.watch_stdin(lambda: os.write(1, b"ended\\n"), limit_s=0.1)  # one write a line: two threads say one each
os.write(1, b"up\\n")
time.sleep(100)
"""


def test_process_that_is_stuck_ends_soon_after_its_stdin() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.stdin.write(b"not for the node")
        process.stdin.flush()
        assert process.poll() is None
        process.stdin.close()
        assert process.stdout.readline() == b"ended\n"
        assert process.wait(30) == 1


def test_process_with_a_stdin_that_cannot_be_read_ends_like_one_whose_stdin_ended() -> None:
    stdin = os.open(os.devnull, os.O_WRONLY)
    try:
        process = subprocess.run(
            [sys.executable, "-c", STUCK], check=False, stdin=stdin, capture_output=True, timeout=30
        )
    finally:
        os.close(stdin)
    assert process.returncode == 1
    assert set(process.stdout.split()) == {b"ended", b"up"}
