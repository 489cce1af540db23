"""A role works while its node lends, ends as when the node leaves, and begins again by itself, in virtual time."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from support.node_settings import resolve
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet
from swarm.network.traffic import Traffic
from swarm.testing import virtual_time
from swarm_node.events.emitter import Emitter
from swarm_node.lending import shifts
from swarm_node.lending.lending import Lending, parse_window
from swarm_node.lending.traffic_count import LinkUse, MonthlyTraffic
from swarm_node.machine.hardware import Hardware, Speeds
from swarm_node.node import Node, NodeRole, StartupSteps
from swarm_node.shutdown import Shutdown
from swarm_node.storage.home import Home
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity

MORNING = datetime.fromisoformat("2026-11-23T11:00:00").timestamp()
GRACE_S = 30.0


class Work(NodeRole):
    """Takes `drain_s` to finish once its shift ends. `log` has when it began and ended."""

    num_steps = 2

    def __init__(self, drain_s: float, *, lasts_s: float = 1e9) -> None:
        self.log: list[tuple[str, float]] = []
        self._drain_s = drain_s
        self._lasts_s = lasts_s

    async def run(self, node: Node) -> None:
        now = asyncio.get_running_loop().time
        self.log.append(("begins", now()))
        node.activity.state = "serving"
        try:
            if not await node.work_end.wait(self._lasts_s):
                return
            await asyncio.sleep(self._drain_s)
            self.log.append(("finished", now()))
        finally:
            self.log.append(("ends", now()))


Case = Callable[[Node, io.StringIO], Awaitable[None]]


def _play(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: tuple[str, ...] = ("11:01-11:03",)
) -> None:
    async def scene() -> None:
        loop, internet, out = asyncio.get_running_loop(), MemoryInternet(), io.StringIO()
        began_s = loop.time()
        clock = MagicMock(time=lambda: MORNING + loop.time() - began_s)
        monkeypatch.setattr(shifts, "time", clock)
        monkeypatch.setattr("swarm_node.node.time", clock)
        network, emitter = internet.network(), Emitter(json=True, out=out, err=io.StringIO())
        lending = Lending(tuple(map(parse_window, hours)), 0, MonthlyTraffic(tmp_path / "traffic.json", MORNING))
        async with Membership(network) as membership:
            node = Node(
                config=resolve({"home": str(tmp_path)}, env={}),
                home=Home(tmp_path),
                identity=Identity.generate(),
                emitter=emitter,
                shutdown=Shutdown(),
                hardware=Hardware(
                    device="cpu",
                    device_name="test",
                    memory_bytes=2**30,
                    free_memory_bytes=2**29,
                    num_cores=1,
                    read_memory=lambda: (2**29, 0),
                    speeds=Speeds(),
                ),
                network=network,
                membership=membership,
                steps=StartupSteps(emitter, 9),
                lending=lending,
                link_use=LinkUse(Traffic(), 0.0),
            )
            node.shutdown.grace_s = GRACE_S
            await case(node, out)
        await internet.close()

    virtual_time.run(scene())


def _events(out: io.StringIO) -> list[str]:
    return [json.loads(line)["event"] for line in out.getvalue().splitlines()]


def test_work_begins_with_the_hours_drains_at_their_end_and_begins_again_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(node: Node, out: io.StringIO) -> None:
        work, began_s, relays = Work(drain_s=10), asyncio.get_running_loop().time(), list[bool]()
        running = asyncio.create_task(shifts.run_in_shifts(node, work, relays.append))
        await asyncio.sleep(30)
        status = await node.status()
        assert (status.state, status.pause, status.lends_again_at) == ("paused", "hours", MORNING + 60)
        record = (await node.membership.nodes())[node.network.peer_id]
        assert (record.state, record.pause, record.lends_again_at) == ("alive", "hours", MORNING + 60)
        await asyncio.sleep(60)
        assert ((await node.status()).state, (await node.status()).pause) == ("serving", "")
        await asyncio.sleep(90 + shifts.LOOK_S + 1)
        assert ((await node.status()).state, (await node.status()).pause) == ("draining", "hours")
        await asyncio.sleep(80)
        assert ((await node.status()).state, (await node.status()).pause) == ("serving", "")
        node.shutdown.request("test")
        await running
        assert [name for name, _ in work.log] == ["begins", "finished", "ends"] * 2
        for (_, at), due_s in zip(work.log[:4], (60, 180 + 10, 180 + 10, 240), strict=True):
            assert 0 <= at - began_s - due_s <= 2 * shifts.LOOK_S
        assert _events(out) == ["paused", "pausing", "paused"]
        assert relays == [False, True, False, True]

    _play(case, tmp_path, monkeypatch, hours=("11:01-11:03", "11:04-11:05"))


def test_steps_of_a_shift_follow_those_of_the_shift_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Helper(Work):
        """Reports its steps only once it has found work, in the second shift, as a node that looks for work does."""

        async def run(self, node: Node) -> None:
            if self.log:
                node.steps.expect(self.num_steps)
                for _ in range(self.num_steps):
                    node.steps.done("works", "")
            await super().run(node)

    async def case(node: Node, out: io.StringIO) -> None:
        running = asyncio.create_task(shifts.run_in_shifts(node, Helper(drain_s=0), bool))
        await asyncio.sleep(270)
        node.shutdown.request("test")
        await running
        lines = [json.loads(line) for line in out.getvalue().splitlines()]
        steps = [(line["number"], line["of"]) for line in lines if line["event"] == "step"]
        assert steps == [(1, Helper.num_steps), (2, Helper.num_steps)]

    _play(case, tmp_path, monkeypatch, hours=("11:01-11:03", "11:04-11:05"))


def test_work_that_does_not_finish_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(node: Node, out: io.StringIO) -> None:
        work, began_s = Work(drain_s=1e6), asyncio.get_running_loop().time()
        running = asyncio.create_task(shifts.run_in_shifts(node, work, bool))
        await asyncio.sleep(240)
        assert [name for name, _ in work.log] == ["begins", "ends"]
        assert work.log[1][1] - began_s <= 180 + GRACE_S + 2 * shifts.LOOK_S
        assert (await node.status()).state == "paused"
        node.shutdown.request("test")
        await running

    _play(case, tmp_path, monkeypatch)


def test_work_that_is_done_or_fails_within_its_hours_ends_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(node: Node, out: io.StringIO) -> None:
        work = Work(drain_s=0, lasts_s=60)
        await shifts.run_in_shifts(node, work, bool)
        assert [name for name, _ in work.log] == ["begins", "ends"]

        class Broken(Work):
            async def run(self, node: Node) -> None:
                raise ConfigError("it cannot be")

        with pytest.raises(ConfigError, match="it cannot be"):
            await shifts.run_in_shifts(node, Broken(drain_s=0), bool)

    _play(case, tmp_path, monkeypatch, hours=("00:00-24:00",))
