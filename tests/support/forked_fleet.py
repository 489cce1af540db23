"""A demo whose nodes are forks of a process that has torch, as it is one itself; see `support.forked_node`.

`begin` goes to a `ForkedNode` that runs `swarm-node demo`: the demo's `Fleet` then starts forks in place of programs.
They are processes with their own sessions, pipes and signals, and die of SIGKILL, as programs do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any
from unittest import mock

from support.forked_node import Begin, ForkedNode, Sent, forking


def begin() -> Begin:
    """Return what the demo's process is to call first. Its nodes are forks of the process of which it is one."""
    forking()
    return partial(_begin, forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]


def _begin(address: str) -> None:
    # Python would start another such process: of its parent's, a fork has the pipe that keeps it alive, and no address
    server = forkserver._forkserver
    mock.patch.multiple(server, _forkserver_address=address, ensure_running=lambda: None).start()
    mock.patch("asyncio.create_subprocess_exec", _create).start()


class ForkedProcess:
    """Have as much of the interface of `asyncio.subprocess.Process` as the demo uses."""

    def __init__(self, node: ForkedNode, stdin: int, stdout: asyncio.StreamReader) -> None:
        self.stdout = stdout
        self.returncode: int | None = None
        self._node, self._stdin, self._ended = node, stdin, asyncio.Event()
        asyncio.get_running_loop().add_reader(node.sentinel, self._end)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._node.sentinel)
        os.close(self._stdin)
        self.returncode = self._node.wait()
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        self._node.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._node.kill()


async def _create(*command: str, env: Mapping[str, str], stderr: IO[bytes], limit: int, **_: Any) -> ForkedProcess:
    """Start what `python -m swarm_node` would."""
    reading, writing = os.pipe()
    node = ForkedNode(
        command[3:],
        environment=env,
        err_path=Path(stderr.name),
        begin=partial(_in_own_session, Sent(reading)),
    )
    os.close(reading)
    stdout = asyncio.StreamReader(limit)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), node.stdout)
    return ForkedProcess(node, writing, stdout)


def _in_own_session(stdin: int) -> None:
    """Begin as a program does that was started with `start_new_session` and a pipe as its standard input."""
    os.setsid()
    os.dup2(stdin, 0)
    os.close(stdin)
    sys.stdin = os.fdopen(0, closefd=False)
