"""Counts what a piece of code must give back: tasks, threads, file descriptors (sockets among them), child processes.

`no_leaks()` compares before and after, and waits a moment of real time for what is already ending, since kernels and
threads close things a little later. Outside an event loop there are no tasks to count.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from swarm.testing.virtual_time import THREAD_NAME

GRACE_S = 3.0
MIN_LOOKS = 5


class Leak(AssertionError):
    """Something was not given back; the message names it."""


@contextmanager
def no_leaks(*, grace_s: float = GRACE_S) -> Iterator[None]:
    """Raises Leak if the block ends normally and leaves something that was not there before it.

    In a running event loop the wait blocks it: tasks must have ended by then, which awaiting them guarantees.
    """
    before = _snapshot()
    yield
    deadline_s, num_looks = time.monotonic() + grace_s, 0
    while leaked := {key: name for key, name in _snapshot().items() if key not in before}:
        num_looks += 1
        # a collection can take seconds, in which nothing else runs: what it held up gets its turns, too
        if time.monotonic() > deadline_s and num_looks > MIN_LOOKS:
            raise Leak(f"left behind: {'; '.join(sorted(leaked.values()))}")
        # an object in a cycle holds its socket until it is collected
        gc.collect()
        time.sleep(0.02)


def _snapshot() -> dict[object, str]:
    """Return what exists now: an identity for each resource, and a readable name."""
    return _tasks() | _threads() | _descriptors() | _children()


def _tasks() -> dict[object, str]:
    try:
        current = asyncio.current_task()
    except RuntimeError:
        return {}
    return {task: f"task {task.get_name()}" for task in asyncio.all_tasks() if task is not current}


def _threads() -> dict[object, str]:
    """Return the threads, without those of a loop's default executor, which ends its own."""
    return {
        thread: f"thread {thread.name}"
        for thread in threading.enumerate()
        if not thread.name.startswith(("asyncio_", THREAD_NAME))
    }


def _descriptors() -> dict[object, str]:
    found: dict[object, str] = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        # the one that listed the folder is gone
        with suppress(FileNotFoundError):
            name = f"file descriptor {descriptor.name} -> {descriptor.readlink()}"
            found[name] = name
    return found


def _children() -> dict[object, str]:
    found: dict[object, str] = {}
    if _has_none():
        return found
    for child in psutil.Process().children(recursive=True):
        # a child may end meanwhile; one that has and was not waited for counts
        with suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline()) if child.status() != psutil.STATUS_ZOMBIE else "ended, not waited for"
            found[child.pid, child.create_time()] = f"process {child.pid} {command[:100]}"
    return found


def _has_none() -> bool:
    """Return whether the system says that this process has no children. psutil looks through those of all processes."""
    children = []
    # a thread may end meanwhile: then nothing is known
    with suppress(FileNotFoundError, ProcessLookupError):
        children = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return bool(children) and not any(children)
