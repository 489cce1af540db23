"""Leaving: the first request drains, the second forces, errors are kept, and the parent process is watched."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.node_process import wait_until
from swarm_node import daemon
from swarm_node.events.emitter import Emitter
from swarm_node.shutdown import Shutdown, signals_to
from swarm_protocol.errors import StartError


def lived(
    life: Callable[[Shutdown], Awaitable[None]], leave: Callable[[Shutdown], None], grace_s: float = 60.0
) -> tuple[bool, list[str]]:
    """Return whether `life` ended cleanly after `leave`, and the emitted events."""
    out = io.StringIO()

    async def scene() -> bool:
        shutdown = Shutdown()
        shutdown.grace_s = grace_s
        task = asyncio.ensure_future(life(shutdown))
        await asyncio.sleep(0)
        leave(shutdown)
        return await daemon._until_over(task, shutdown, Emitter(json=True, out=out, err=io.StringIO()))

    clean = asyncio.run(scene())
    return clean, [json.loads(line)["event"] for line in out.getvalue().splitlines()]


async def obedient(shutdown: Shutdown) -> None:
    await shutdown.leaving.wait()


async def stubborn(_departure: Shutdown) -> None:
    await asyncio.Event().wait()


def ask(shutdown: Shutdown) -> None:
    shutdown.request("test")


def ask_twice(shutdown: Shutdown) -> None:
    shutdown.request("test")
    shutdown.request("again")
    assert shutdown.reason == "test"


def test_until_over_ends_cleanly_when_the_role_drains() -> None:
    assert lived(obedient, ask) == (True, ["draining"])


def test_until_over_ends_cleanly_when_the_role_finishes() -> None:
    async def done(shutdown: Shutdown) -> None:
        pass

    assert lived(done, lambda shutdown: None) == (True, [])


def test_until_over_cancels_a_role_that_takes_too_long() -> None:
    assert lived(stubborn, ask, grace_s=0.05) == (False, ["draining"])


def test_until_over_does_not_wait_after_a_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "FORCED_S", 0.05)
    assert lived(stubborn, ask_twice) == (False, ["draining"])
    assert lived(obedient, ask_twice) == (True, ["draining"])
    assert lived(stubborn, lambda shutdown: shutdown.force("stop")) == (False, ["draining"])


def test_until_over_gives_a_finished_role_time_to_close() -> None:
    closed = []

    async def slow_to_close(shutdown: Shutdown) -> None:
        await shutdown.leaving.wait()
        shutdown.finished.set()
        await asyncio.sleep(0.1)
        closed.append(True)

    assert lived(slow_to_close, ask, grace_s=0.05) == (True, ["draining"])
    assert closed


def test_run_ends_in_time_when_the_life_ignores_its_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a thread that hangs while the node closes would keep the process for ever."""
    exits, released = [], []

    async def deaf(*_: object) -> None:
        done = asyncio.Event()
        released.append(done)
        while not done.is_set():
            try:
                await done.wait()
            except asyncio.CancelledError:
                continue

    def exit_at_once(code: int) -> None:
        exits.append(code)
        released[0].set()

    async def scene() -> tuple[int, str]:
        out = io.StringIO()
        emitter = Emitter(json=True, out=out, err=io.StringIO())
        shutdown = Shutdown()
        shutdown.grace_s = 0.01
        monkeypatch.setattr(daemon, "Shutdown", lambda: shutdown)
        shutdown.request("test")
        async with asyncio.timeout(60):
            config = SimpleNamespace(tethered=False)
            code = await daemon._run(config, None, emitter, None)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        return code, out.getvalue()

    monkeypatch.setattr(daemon, "_live", deaf)
    monkeypatch.setattr(daemon, "CLOSE_S", 0.05)
    monkeypatch.setattr(daemon.os, "_exit", exit_at_once)
    code, told = asyncio.run(scene())
    assert exits == [code] == [daemon.EXIT_STUCK]
    events = [json.loads(line) for line in told.splitlines()]
    assert [event["event"] for event in events] == ["draining", "warning", "stopped"]
    assert events[-1]["clean"] is False


def test_run_that_was_asked_to_leave_and_cut_work_off_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure systemd starts a node again, although `swarm-node stop` or `drain` had ended it."""
    out, shutdown = io.StringIO(), Shutdown()
    monkeypatch.setattr(daemon, "Shutdown", lambda: shutdown)
    monkeypatch.setattr(daemon, "_live", lambda *_: asyncio.sleep(60))
    shutdown.force("stop")
    config = SimpleNamespace(tethered=False)
    emitter = Emitter(json=True, out=out, err=io.StringIO())
    code = asyncio.run(daemon._run(config, None, emitter, None))  # type: ignore[arg-type]
    assert (code, json.loads(out.getvalue().splitlines()[-1])["clean"]) == (0, False)


def test_until_over_raises_the_cause_when_the_life_fails() -> None:
    async def failing(shutdown: Shutdown) -> None:
        async with asyncio.TaskGroup():
            raise StartError("the libp2p daemon ended")

    with pytest.raises(StartError, match="the libp2p daemon ended"):
        lived(failing, lambda shutdown: None)


def test_signals_that_nohup_has_ignored_stay_ignored() -> None:
    async def scene() -> None:
        shutdown = Shutdown()
        with signals_to(shutdown):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            await shutdown.leaving.wait()
        assert shutdown.reason == "SIGTERM"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(scene())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_service_and_its_child_processes_ignore_the_signal_with_which_logrotate_ends() -> None:
    """A service has no terminal that could close, and systemd does not start one again that has left by itself."""
    script = """
import asyncio, os, signal, subprocess
from swarm_node.shutdown import Shutdown, ignore_hangup, signals_to

async def scene():
    shutdown = Shutdown()
    with signals_to(shutdown):
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        os.killpg(0, signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        await shutdown.leaving.wait()
    child.communicate()
    print(child.returncode, shutdown.reason)

signal.signal(signal.SIGHUP, signal.SIG_DFL)
ignore_hangup()
asyncio.run(scene())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], start_new_session=True, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0 SIGTERM\n"), done.stderr


def test_service_ignores_it_while_it_still_loads_its_libraries(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "swarm_node", "seed", "--home", tmp_path / "home"], start_new_session=True
    ) as node:
        wait_until((tmp_path / "home" / "daemon.lock").exists, "the home is not locked")
        node.send_signal(signal.SIGHUP)
        node.terminate()
    assert node.returncode != -signal.SIGHUP


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "the terminal is gone")],
)
def test_signals_first_drain_then_force(number: signal.Signals, reason: str) -> None:
    async def scene() -> None:
        shutdown = Shutdown()
        with signals_to(shutdown):
            os.kill(os.getpid(), number)
            await shutdown.leaving.wait()
            assert shutdown.reason == reason
            assert not shutdown.forced.is_set()
            os.kill(os.getpid(), number)
            await shutdown.forced.wait()
        assert signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}

    before = signal.signal(number, signal.SIG_DFL)  # under nohup the tests themselves ignore SIGHUP
    try:
        asyncio.run(scene())
    finally:
        signal.signal(number, before)


STUCK = """
import os, time
from swarm_node import shutdown
shutdown.watch_stdin(lambda: os.write(1, b"ended\\n"), limit_s=0.1)  # one write a line: two threads say one each
os.write(1, b"up\\n")
time.sleep(100)
"""


def test_stuck_process_ends_soon_after_its_stdin_is_closed() -> None:
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


def test_process_ends_when_its_stdin_cannot_be_read() -> None:
    stdin = os.open(os.devnull, os.O_WRONLY)
    try:
        process = subprocess.run(
            [sys.executable, "-c", STUCK], check=False, stdin=stdin, capture_output=True, timeout=120
        )
    finally:
        os.close(stdin)
    assert process.returncode == 1
    assert set(process.stdout.split()) == {b"ended", b"up"}
