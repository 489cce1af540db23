"""`swarm-node chat` as people use it: in a pipe, and in a terminal where Ctrl-C stops an answer and Ctrl-D ends it."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys

END_S = 120.0
"""Longer than any test waits for an answer."""


async def chat_in_pipe(*arguments: str, text: str) -> tuple[int | None, str, str]:
    """Return the exit code, the answer to `text`, and the other output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm_node", "chat", *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(END_S):
        out, err = await process.communicate(text.encode())
    return process.returncode, out.decode(), err.decode()


async def until(line: bytes, terminal: int) -> bytes:
    """Return what a program writes to its terminal, up to and with `line`."""
    seen = b""
    async with asyncio.timeout(END_S):
        while line not in seen:
            seen += await asyncio.to_thread(os.read, terminal, 4096)
    return seen


async def chat_in_terminal(*arguments: str) -> None:
    """Send a prompt, stop the answer by Ctrl-C as soon as it begins, and end by Ctrl-D."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm_node", "chat", *arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "dumb"},  # no terminal codes between prompt and answer
    )
    os.close(theirs)
    await until(b"> ", ours)
    os.write(ours, b"def add(a, b):\n")
    await until(b"):\r\n", ours)
    assert await asyncio.to_thread(os.read, ours, 1), "an answer has begun"
    process.send_signal(signal.SIGINT)
    await until(b"\n> ", ours)
    os.write(ours, b"\x04")
    async with asyncio.timeout(END_S):
        assert await process.wait() == 0
    os.close(ours)
