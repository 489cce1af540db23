"""The leak counter names each kind of thing that was not given back, and nothing that was."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading

import pytest
from support.leaks import Leak, no_leaks


def test_no_leaks_with_everything_given_back_passes() -> None:
    with no_leaks():
        thread = threading.Thread(target=lambda: None)
        thread.start()
        with socket.socket():
            pass
        subprocess.run([sys.executable, "-S", "-c", ""], check=True, timeout=120)


def test_no_leaks_with_something_that_ends_soon_waits_for_it() -> None:
    release = threading.Event()
    with no_leaks():
        thread = threading.Thread(target=release.wait)
        thread.start()
        threading.Timer(0.1, release.set).start()


def test_no_leaks_with_socket_left_open_names_it() -> None:
    left: list[socket.socket] = []
    with pytest.raises(Leak, match=r"file descriptor \d+ -> socket"), no_leaks(grace_s=0.05):
        left.append(socket.socket())
    left[0].close()


def test_no_leaks_with_thread_left_names_it() -> None:
    release = threading.Event()
    with pytest.raises(Leak, match="thread forgotten"), no_leaks(grace_s=0.05):
        threading.Thread(target=release.wait, name="forgotten").start()
    release.set()


def test_no_leaks_with_process_left_names_it() -> None:
    children: list[subprocess.Popen[bytes]] = []
    with pytest.raises(Leak, match=r"process \d+ .*import time"), no_leaks(grace_s=0.3):
        children.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]))
    children[0].kill()
    children[0].wait()


def test_no_leaks_with_child_that_nobody_waited_for_names_it() -> None:
    children: list[subprocess.Popen[bytes]] = []
    with pytest.raises(Leak, match="ended, not waited for"), no_leaks(grace_s=1):
        children.append(subprocess.Popen(["/bin/true"]))
    children[0].wait()


def test_no_leaks_with_task_left_names_it_and_counts_none_from_before() -> None:
    async def main() -> None:
        older = asyncio.create_task(asyncio.sleep(60), name="older")
        tasks = [older]
        with pytest.raises(Leak, match="task forgotten") as caught, no_leaks(grace_s=0):
            tasks.append(asyncio.create_task(asyncio.sleep(60), name="forgotten"))
        assert "older" not in str(caught.value)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(main())


def test_no_leaks_with_default_executor_used_does_not_count_its_threads() -> None:
    async def main() -> None:
        with no_leaks(grace_s=0):
            await asyncio.to_thread(len, "abc")

    asyncio.run(main())


def test_no_leaks_with_failing_block_raises_its_error() -> None:
    with pytest.raises(KeyError), no_leaks():
        raise KeyError
