"""Lingering for members that are a step behind: for how long, and what is reported. Real records, virtual time."""

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
    """Return how long a member lingers beside one that is behind for `behind_s`, and the arguments of `on_wait`."""
    heard: list[tuple[tuple[str, ...], float]] = []

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
                membership, "run", me.peer_id, on_wait=lambda peers, seconds: heard.append((peers, seconds))
            )
            took_s = asyncio.get_running_loop().time() - started_s
        assert all(peers == (other.peer_id,) for peers, _ in heard)
        await internet.close()
        return took_s

    return virtual_time.run(main()), heard


def test_linger_that_takes_a_moment_is_not_reported() -> None:
    took_s, heard = linger(0.5)
    assert took_s == pytest.approx(1, abs=0.5)
    assert heard == []


def test_linger_beside_a_member_that_never_finishes_is_reported_once_and_ends() -> None:
    took_s, heard = linger(1000)
    assert took_s == pytest.approx(LINGER_S, abs=2)
    [(_, seconds)] = heard
    assert seconds == pytest.approx(LINGER_S - 1, abs=0.5)
