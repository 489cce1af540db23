"""Tests a member whose clock is wrong for a while, as after a pause of its virtual machine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from support.training_swarm import Member, Swarm, SyntheticInner, assert_equal_steps, config
from swarm.network.memory.memory_network import MemoryNetwork
from swarm.testing import virtual_time
from swarm.training.trainer_events import OuterStep
from swarm_protocol.version import Hello, software_version


def hello_without_a_time(network: MemoryNetwork) -> Hello:
    """Return a greeting without the time. Connections of libp2p compare clocks only when a node joins."""
    return Hello(network_id=network.network_id, software_version=software_version())


@pytest.mark.parametrize(("ahead_s", "is_left_out"), [(3600.0, False), (-3600.0, True)])
def test_member_takes_part_again_once_its_clock_is_right(
    ahead_s: float, is_left_out: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While its clock is ahead, the others check its parts at its backups. While it is behind, it accepts none of
    theirs."""
    monkeypatch.setattr(MemoryNetwork, "_hello", hello_without_a_time)

    async def main() -> None:
        async with Swarm(config(outer_steps=24, min_group=2)) as swarm:
            for name in ("a", "b", "c"):
                await swarm.join(name, inner=SyntheticInner(virtual_step_s=0.5))
            member, steps = swarm.members["b"], partial(swarm.members["a"].of, OuterStep)
            await asyncio.sleep(10)
            set_clock(member, ahead_s)
            await asyncio.sleep(20)
            set_clock(member, 0.0)
            groups = [event.group for event in steps()]
            assert "one of the two clocks is wrong" in caplog.text, "the wrong clock had no effect"
            assert any(member.peer_id not in group for group in groups) == is_left_out
            async with asyncio.timeout(20):
                while len(steps()) < len(groups) + 2 or member.peer_id not in steps()[-1].group:
                    await asyncio.sleep(0.1)
            assert_equal_steps(await swarm.finish(), 24)
            assert member.peer_id in steps()[-1].group

    virtual_time.run(main())


def set_clock(member: Member, ahead_s: float) -> None:
    member.network._access = replace(member.network._access, clock_offset_s=ahead_s)
