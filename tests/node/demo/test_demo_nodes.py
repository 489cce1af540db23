"""None of the demo's processes is left, however the demo or they end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from swarm_node.demo.nodes import DemoError, DemoState, Fleet

READY = 'print(\'{"event": "ready", "peer_id": "x", "addrs": []}\', flush=True)\n'
ERROR = 'print("""{"event": "error", "message": "the port is taken", "remedy": ""}""")\nraise SystemExit(1)\n'
FOREVER = "import time\ntime.sleep(1000)\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + FOREVER


def _with_fleet(tmp_path: Path, script: str, use: Callable[[Fleet], Awaitable[None]]) -> None:
    """Run `use` on a fleet whose nodes are `script`."""

    async def main() -> None:
        async with asyncio.timeout(60):
            state = DemoState(num_nodes=1)
            program = (sys.executable, "-c", script)
            async with Fleet(tmp_path, state, lambda _name, _event: None, program=program) as fleet:
                await use(fleet)

    asyncio.run(main())


async def _ready(fleet: Fleet) -> int:
    node = await fleet.spawn("node-1", "join")
    await fleet.until(lambda: fleet.state.node("node-1").state == "ready", within_s=30, what="starting")
    return node.process.pid


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("script", [READY + FOREVER, STUBBORN])
def test_node_is_gone_when_the_fleet_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr("swarm_node.demo.nodes.STOP_GRACE_S", 0.3)
    pids: list[int] = []

    async def use(fleet: Fleet) -> None:
        pids.append(await _ready(fleet))

    _with_fleet(tmp_path, script, use)
    assert _is_gone(pids[0])


def test_node_is_gone_when_the_demo_is_cancelled_twice(tmp_path: Path) -> None:
    pids: list[int] = []

    async def use(fleet: Fleet) -> None:
        pids.append(await _ready(fleet))
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        loop.call_soon(task.cancel)
        loop.call_later(0.2, task.cancel)
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        _with_fleet(tmp_path, STUBBORN, use)
    assert _is_gone(pids[0])


def test_node_that_ends_early_ends_the_wait_with_its_last_output(tmp_path: Path) -> None:
    async def use(fleet: Fleet) -> None:
        with pytest.raises(DemoError, match=r"node-1 ended early \(exit 3\): no room left.*node-1\.log"):
            await _ready(fleet)

    _with_fleet(tmp_path, "import sys\nprint('no room left', file=sys.stderr)\nsys.exit(3)", use)


def test_node_that_ends_early_is_quoted_by_its_error_event(tmp_path: Path) -> None:
    async def use(fleet: Fleet) -> None:
        with pytest.raises(DemoError, match="the port is taken"):
            await _ready(fleet)

    _with_fleet(tmp_path, ERROR, use)


def test_node_that_ends_before_its_output_is_read_is_quoted_too(tmp_path: Path) -> None:
    async def use(fleet: Fleet) -> None:
        node = await fleet.spawn("node-1", "join")
        output: Any = node.process._transport.get_pipe_transport(1)  # type: ignore[attr-defined]
        output.pause_reading()
        while not node.ended:
            await asyncio.sleep(0.01)
        fleet.check()
        output.resume_reading()
        with pytest.raises(DemoError, match="the port is taken"):
            await fleet.until(lambda: False, within_s=60, what="a second event")

    _with_fleet(tmp_path, ERROR, use)


def test_node_that_prints_no_events_is_detected(tmp_path: Path) -> None:
    async def use(fleet: Fleet) -> None:
        with pytest.raises(DemoError, match="not an event: b'hello"):
            await _ready(fleet)

    _with_fleet(tmp_path, "print('hello', flush=True)\n" + FOREVER, use)


def test_wait_that_takes_too_long_says_what_it_waited_for(tmp_path: Path) -> None:
    async def use(fleet: Fleet) -> None:
        await fleet.spawn("node-1", "join")
        with pytest.raises(DemoError, match="the miracle took more than 0 s"):
            await fleet.until(lambda: False, within_s=0.05, what="the miracle")

    _with_fleet(tmp_path, FOREVER, use)


def test_node_that_the_demo_killed_is_no_error(tmp_path: Path) -> None:
    async def use(fleet: Fleet) -> None:
        await _ready(fleet)
        fleet.kill("node-1")
        await fleet.processes["node-1"].process.wait()
        fleet.check()
        assert fleet.state.node("node-1").state == "killed"

    _with_fleet(tmp_path, READY + FOREVER, use)


def test_nodes_get_neither_the_terminal_nor_our_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NAME", "another")
    script = (
        "import os, sys\n"
        "assert os.getsid(0) == os.getpid()\n"
        "assert not any(name.startswith('SWARM_') for name in os.environ)\n"
        "assert not sys.stdin.isatty()\n" + READY + FOREVER
    )

    async def use(fleet: Fleet) -> None:
        await _ready(fleet)

    _with_fleet(tmp_path, script, use)
