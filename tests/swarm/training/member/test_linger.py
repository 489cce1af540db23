"""Tests how long a finished member lingers for members that are a step behind, and what it reports. Records are real,
time is virtual."""

from __future__ import annotations

import asyncio

import pytest
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet
from swarm.testing import virtual_time
from swarm.training.member.members_watch import LINGER_S, let_others_finish
from swarm_protocol.identity import Identity
from swarm_protocol.records import TrainerRecord


def linger(behind_s: float) -> tuple[float, list[tuple[tuple[str, ...], float]]]:
    """Return how long a member lingers beside one that finishes `behind_s` later, and the arguments of `on_wait`."""
    reports: list[tuple[tuple[str, ...], float]] = []

    async def main() -> float:
        internet = MemoryInternet()
        me, other = (internet.network(Identity(name * 32)) for name in (b"a", b"b"))
        async with Membership(me) as membership, Membership(other) as others:
            others.announce(TrainerRecord(run="run", outer_step=1, state="training"))
            await asyncio.sleep(1)
            started_s = asyncio.get_running_loop().time()

            def finish() -> None:
                others.announce(TrainerRecord(run="run", outer_step=2, state="finished"))

            asyncio.get_running_loop().call_later(behind_s, finish)
            await let_others_finish(
                membership, "run", me.peer_id, on_wait=lambda peers, seconds: reports.append((peers, seconds))
            )
            took_s = asyncio.get_running_loop().time() - started_s
        assert all(peers == (other.peer_id,) for peers, _ in reports)
        await internet.close()
        return took_s

    return virtual_time.run(main()), reports


def test_linger_is_not_reported_when_it_is_short() -> None:
    took_s, reports = linger(0.5)
    assert took_s == pytest.approx(1, abs=0.5)
    assert reports == []


def test_linger_is_reported_once_and_ends_when_a_member_never_finishes() -> None:
    took_s, reports = linger(1000)
    assert took_s == pytest.approx(LINGER_S, abs=2)
    [(_, seconds)] = reports
    assert seconds == pytest.approx(LINGER_S - 1, abs=0.5)
