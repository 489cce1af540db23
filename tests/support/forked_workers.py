"""Workers of pytest-xdist that are forks of one process that has torch, as nodes of tests are (`support.forked_node`).

As a program, each would import torch and transformers anew, for five seconds of the processor, and so would the process
of whose forks its tests make nodes. A shell's `time` does not count forks, for their parent is not waited for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any
from unittest import mock

from execnet import gateway_io
from execnet.gateway_base import Popen2IO
from support.forked_node import Sent, forking, share, shared


def use() -> None:
    """Let execnet fork from now on where it would start a program."""
    mock.patch.object(gateway_io, "Popen2IOMaster", ForkedWorker).start()


class ForkedWorker(Popen2IO):
    """Stand in for execnet's end of a program. It writes the source of a worker to the fork, which runs it."""

    def __init__(self, _command: object, execmodel: Any) -> None:
        (their_in, ours_out), (ours_in, their_out) = os.pipe(), os.pipe()
        address = shared()
        self._process = forking().Process(
            target=_run, args=(Sent(their_in), Sent(their_out), address, dict(os.environ)), name="worker"
        )
        self._process.start()
        os.close(their_in)
        os.close(their_out)
        super().__init__(os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb"), execmodel=execmodel)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run(in_: int, out: int, address: str, environment: Mapping[str, str]) -> None:
    for ours, standard in ((in_, 0), (out, 1)):
        os.dup2(ours, standard)
        os.close(ours)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    share(address)
    # processes that tests spawn would import pytest, as this one has
    sys.modules["__main__"] = ModuleType("__main__")
    exec(eval(sys.stdin.readline()), {})  # as the programs that execnet starts
