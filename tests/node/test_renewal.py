"""A running node notices that its machine has slept, and that its clock differs from those of its peers."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from swarm.network.libp2p.greeting import CLOCK_S, Greeting, hello_of
from swarm.network.suspension import SUSPENDED_S
from swarm.testing import virtual_time
from swarm_node import daemon
from swarm_node.events.emitter import Emitter
from swarm_protocol.version import PROTOCOL_VERSION


def test_records_are_renewed_once_after_each_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed_s: list[float] = []
    slept_s = 0.0

    async def main() -> None:
        nonlocal slept_s
        now = asyncio.get_running_loop().time
        watch = daemon.SuspensionWatch
        monkeypatch.setattr(daemon, "SuspensionWatch", lambda: watch(lambda: now() + slept_s, now))
        membership = SimpleNamespace(renew=lambda: renewed_s.append(now()))
        renewing = asyncio.create_task(daemon._keep_renewed(cast("Any", SimpleNamespace(membership=membership))))
        await asyncio.sleep(3600)
        assert not renewed_s
        woken_s = []
        for _ in range(2):
            slept_s += 2 * SUSPENDED_S
            woken_s.append(now())
            await asyncio.sleep(60)
        assert len(renewed_s) == 2
        assert all(at - woken <= daemon.AWAKE_S for at, woken in zip(renewed_s, woken_s, strict=True))
        renewing.cancel()
        await asyncio.wait((renewing,))

    virtual_time.run(main())


def test_running_node_reports_a_wrong_clock_once_and_its_correction_once() -> None:
    out, skew_s = io.StringIO(), 0.0

    async def ask_greetings() -> list[Greeting]:
        return [Greeting(hello=hello_of("swarm", 1.0), skew_s=each) for each in (skew_s, skew_s + 1, 0.0)]

    async def main() -> None:
        nonlocal skew_s
        node = SimpleNamespace(emitter=Emitter(json=True, out=out, err=io.StringIO()))
        network = SimpleNamespace(ask_greetings=ask_greetings)
        watching = asyncio.create_task(daemon._keep_compared_with_peers(cast("Any", node), cast("Any", network)))
        for ahead_s in (0.0, 40.0, 2.0, -100.0):
            skew_s = ahead_s
            await asyncio.sleep(5 * CLOCK_S)
        watching.cancel()
        await asyncio.wait((watching,))

    virtual_time.run(main())
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [each["event"] for each in told] == ["warning", "clock_right", "warning"]
    assert told[0]["message"].startswith("this machine's clock is 40 s behind those of its peers")
    assert told[1]["seconds"] == 2.0
    assert told[2]["message"].startswith("this machine's clock is 99 s ahead of those of its peers")


@pytest.mark.parametrize(("ahead", "remedy"), [(1, "update this node"), (-1, "ask their operators to update")])
def test_running_node_reports_once_that_its_peers_speak_another_version(ahead: int, remedy: str) -> None:
    out = io.StringIO()
    theirs = dataclasses.replace(hello_of("swarm"), protocol_version=PROTOCOL_VERSION + ahead)

    async def ask_greetings() -> list[Greeting]:
        return [Greeting(hello=theirs, skew_s=0.0)]

    async def main() -> None:
        node = SimpleNamespace(emitter=Emitter(json=True, out=out, err=io.StringIO()))
        network = SimpleNamespace(ask_greetings=ask_greetings)
        watching = asyncio.create_task(daemon._keep_compared_with_peers(cast("Any", node), cast("Any", network)))
        await asyncio.sleep(5 * CLOCK_S)
        watching.cancel()
        await asyncio.wait((watching,))

    virtual_time.run(main())
    (told,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert told["event"] == "warning"
    assert told["message"].startswith(f"connected peers speak protocol {PROTOCOL_VERSION + ahead} (software ")
    assert f"and this node {PROTOCOL_VERSION} (software " in told["message"]
    assert told["remedy"] == remedy
