"""`swarm-node` processes that are forks of one which has imported what a node needs.

Importing torch and transformers takes five seconds of the processor, and what every node needs 0.6 s, which each
started program spends anew. All else is as in a started one: a process with its own arguments, environment, output and
signals. What a program imports by itself, and when, only a started one shows.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any
from unittest import mock

from swarm_node.diagnostics import quieten_imports

# as a started program does before it imports transformers: else that shows a bar for what an export writes, whose lock
# is a named semaphore that nobody removes when the node ends
quieten_imports()
# one for all tests: Python itself has one such process at most, which imports what was named when it started
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["support.computing_node"])
# and another one for nodes that do not compute: seeds and nodes that stand by above all
LIGHT = forkserver.ForkServer()
LIGHT.set_forkserver_preload(
    ["swarm_node.cli", "swarm_node.daemon", "swarm_node.roles.seed", "swarm_node.roles.helper"]
)

Begin = Callable[[], None]
"""What a fork calls first. The fork imports its module: a test's own would take seconds, for it imports torch."""


def forking() -> ForkServerContext:
    """The context whose processes have torch from their start."""
    # the process that forks is started by Python, and finds there what it is to import
    where = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, PYTHONPATH=where):
        forkserver.ensure_running()
    return FORKING


class ForkedNode:
    """A process with as much of subprocess.Popen's interface as tests use. Its standard output is `stdout`. It calls
    `begin` before anything else. One that `computes` has torch from its start."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        err_path: Path,
        begin: Begin | None = None,
        computes: bool = True,
    ) -> None:
        reading, writing = os.pipe()
        self.stdout: IO[str] = os.fdopen(reading)
        self._process = (forking() if computes else FORKING).Process(
            target=_run, args=(arguments, environment, err_path, Sent(writing), begin)
        )
        server = forkserver._forkserver if computes else LIGHT
        with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
            self._process.start()
        os.close(writing)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.sentinel = self._process.sentinel

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("swarm-node", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Sent:
    """A file descriptor that is another process's own once it arrives there."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        return _arrived, (DupFd(self._descriptor),)


def _arrived(sent: Any) -> int:
    descriptor: int = sent.detach()
    return descriptor


def _run(
    arguments: Sequence[str], environment: Mapping[str, str], err_path: Path, out: int, begin: Begin | None
) -> None:
    if begin is not None:
        begin()
    os.dup2(out, 1)
    os.close(out)
    with err_path.open("w") as err:
        os.dup2(err.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", closefd=False) for descriptor in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["swarm-node", *arguments]
    from support import unpacked_daemon  # noqa: PLC0415 - the process that starts forks needs nothing of these
    from swarm_node.__main__ import main  # noqa: PLC0415

    unpacked_daemon.use()
    main()
