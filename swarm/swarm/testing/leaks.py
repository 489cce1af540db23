"""Counts what a piece of code must give back: tasks, threads, file descriptors (sockets among them), child processes.

`no_leaks()` compares before and after, and waits a moment of real time for what is already ending, since kernels and
threads close things a little later. Outside an event loop there are no tasks to count.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from swarm.testing.virtual_time import THREAD_NAME

GRACE_S = 3.0


class Leak(AssertionError):
    """Something was not given back; the message names it."""


@contextmanager
def no_leaks(*, grace_s: float = GRACE_S) -> Iterator[None]:
    """Raises Leak if the block ends normally and leaves something that was not there before it.

    In a running event loop the wait blocks it: tasks must have ended by then, which awaiting them guarantees.
    """
    before = _snapshot()
    yield
    deadline_s = time.monotonic() + grace_s
    while leaked := _snapshot() - before:
        # an object in a cycle holds its socket until it is collected
        gc.collect()
        if time.monotonic() > deadline_s:
            raise Leak(f"left behind: {'; '.join(sorted(leaked))}")
        time.sleep(0.02)


def _snapshot() -> set[str]:
    return _tasks() | _threads() | _descriptors() | _children()


def _tasks() -> set[str]:
    try:
        current = asyncio.current_task()
    except RuntimeError:
        return set()
    return {f"task {task.get_name()} ({id(task)})" for task in asyncio.all_tasks() if task is not current}


def _threads() -> set[str]:
    """Without those of a loop's default executor, which ends them with itself."""
    return {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not thread.name.startswith(("asyncio_", THREAD_NAME))
    }


def _descriptors() -> set[str]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        # the one that listed the folder is gone
        with suppress(FileNotFoundError):
            found.add(f"file descriptor {descriptor.name} -> {descriptor.readlink()}")
    return found


def _children() -> set[str]:
    own = psutil.Process(os.getpid())
    found = set()
    for child in own.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.add(f"process {child.pid} {' '.join(child.cmdline()[:3])}")
    return found
