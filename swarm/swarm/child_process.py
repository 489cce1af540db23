"""A child process that answers messages one after another, within limits of time and memory, and dies with its parent.

It is a fresh interpreter: a thread could not be killed, and a fork would share the parent's locks and sockets. It has
none of the parent's files, sockets and environment. What runs in it is the program's business; it should end when its
pipe does. Blocking: one thread asks, any may kill.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import IO

import psutil

WATCH_S = 0.05
"""Interval between two looks at the memory of a child that is busy."""

INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONPYCACHEPREFIX")
"""Environment variables that an interpreter may need to start at all."""


OUT_OF_MEMORY = 71
"""Exit code of a child that could not get the memory it needed."""


class ChildFailure(Exception):
    """The child exceeded its limits or died, and is gone. The text says so, as what the child did."""


def module_path() -> str:
    """PYTHONPATH for a child that shall find the modules that are found here; -P keeps its directory out."""
    return os.pathsep.join(filter(None, sys.path))


def how_it_ended(code: int, told: IO[bytes]) -> str:
    """Describe the end of a child process. `told` is the file that it wrote its errors to."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    told.seek(0)
    last = told.read().decode(errors="replace").strip().rpartition("\n")[2]
    return f"failed: {last or f'exit code {code}'}"


def limit_waits(pipe: Connection, within_s: float) -> None:
    """Let no single read or write of `pipe` wait any longer: it raises BlockingIOError instead. `poll` alone would not
    see that the other end stops within a message."""
    limit = struct.pack("ll", *divmod(max(1, int(within_s * 1e6)), 10**6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)


class ChildProcess:
    """Runs `main(fd, memory_bytes)` of `module` with `environment`; `fd` is its end of a `multiprocessing.connection`.

    Modules named `without` are not there for it.
    """

    def __init__(
        self, module: str, *, environment: Mapping[str, str], memory_bytes: int, without: Sequence[str] = ()
    ) -> None:
        self._memory_bytes = memory_bytes
        self._asking = threading.RLock()
        self._told = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `kill`
        self._pipe, theirs = Pipe()
        program = "".join(f"sys.modules[{name!r}] = None; " for name in without)
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module, without a shell
                [
                    *(sys.executable, "-P", "-c"),
                    f"import sys; {program}from {module} import main; main({theirs.fileno()}, {memory_bytes})",
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._told,
                stderr=self._told,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env={**inherited, "PYTHONPATH": module_path(), "PYTHONUTF8": "1", **environment},
                start_new_session=True,  # a Ctrl-C is for the parent, which then ends it
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: bytes, *, within_s: float, max_bytes: int, fd: int | None = None) -> bytes:
        """Return the child's answer, of `max_bytes` at most. Raises ChildFailure; then the child has been killed.

        A file descriptor `fd` is sent after the message, for `multiprocessing.reduction.recv_handle`.
        """
        with self._asking:
            try:
                return self._exchange(message, fd, time.monotonic() + within_s, max_bytes)
            except (TimeoutError, BlockingIOError):
                self.kill()
                raise ChildFailure(f"exceeded its limits: it took over {within_s:g} s") from None
            except (EOFError, OSError):
                how = self._how_it_ended()
                self.kill()
                raise ChildFailure(how) from None
            except BaseException:
                self.kill()
                raise

    def kill(self) -> None:
        """End the process. Later requests fail with its end. A second call does nothing."""
        self._process.kill()
        self._process.wait()
        with self._asking:
            self._pipe.close()
            self._told.close()

    def _exchange(self, message: bytes, fd: int | None, deadline_s: float, max_bytes: int) -> bytes:
        limit_waits(self._pipe, deadline_s - time.monotonic())
        self._pipe.send_bytes(message)
        if fd is not None:
            send_handle(self._pipe, fd, self.pid)
        while not self._pipe.poll(min(WATCH_S, max(0.0, deadline_s - time.monotonic()))):
            if time.monotonic() >= deadline_s:
                raise TimeoutError
            # a second guard where the system does not enforce RLIMIT_AS (macOS)
            with suppress(psutil.Error):
                if psutil.Process(self._process.pid).memory_info().rss > self._memory_bytes:
                    raise ChildFailure(self._over_memory())
        limit_waits(self._pipe, deadline_s - time.monotonic())
        return self._pipe.recv_bytes(max_bytes)

    def _over_memory(self) -> str:
        return f"exceeded its limits: it needed over {self._memory_bytes / 2**30:.3g} GiB of memory"

    def _how_it_ended(self) -> str:
        """Describe the end of a child that closed its pipe or sent too much."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "exceeded its limits: its answer is too large"
        if code in {OUT_OF_MEMORY, -signal.SIGABRT}:  # Rust's and C++'s way to say that there is none left
            return self._over_memory()
        if code == -signal.SIGXCPU:
            return "exceeded its limits: it took too much of the processor's time"
        return how_it_ended(code, self._told)
