"""Many who poll the connections ask the daemon as often as one: in virtual time, with a scripted daemon."""

from __future__ import annotations

import asyncio

import pytest
from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.host import PAUSE_S, Connections, SharedLook
from swarm.testing import virtual_time

ANSWER_S = 0.001


class Daemon:
    """Its connections, what it is asked, and how many of the first questions fail."""

    def __init__(self, num_failures: int = 0) -> None:
        self.connections: Connections = {}
        self.num_asked = 0
        self._num_failures = num_failures

    async def connected_peers(self) -> Connections:
        self.num_asked += 1
        if self.num_asked <= self._num_failures:
            raise ControlError("busy")
        seen = dict(self.connections)
        await asyncio.sleep(ANSWER_S)
        return seen


def test_forty_attempts_that_poll_for_seconds_ask_as_often_as_one() -> None:
    async def main() -> None:
        daemon = Daemon()
        shared = SharedLook(daemon)

        async def attempt() -> None:
            async with asyncio.timeout(4.0):
                while "peer" not in await shared.look():
                    await asyncio.sleep(0.02)

        attempts = [asyncio.create_task(attempt()) for _ in range(40)]
        await asyncio.sleep(3.0)
        daemon.connections["peer"] = ("/ip4/192.0.2.7/tcp/4001",)
        await asyncio.sleep(3 * PAUSE_S + 0.02)
        assert all(each.done() for each in attempts)
        await asyncio.gather(*attempts)
        assert daemon.num_asked <= 3.1 / PAUSE_S

    virtual_time.run(main())


def test_answer_is_never_older_than_the_question() -> None:
    async def main() -> None:
        daemon = Daemon()
        shared = SharedLook(daemon)
        first = asyncio.create_task(shared.look())
        await asyncio.sleep(ANSWER_S / 2)  # it has been asked for, and its answer is on its way
        daemon.connections["peer"] = ()
        assert "peer" in await shared.look()
        assert "peer" not in await first
        daemon.connections.clear()
        assert await shared.look() == {}

    virtual_time.run(main())


def test_one_that_looks_now_and_then_waits_for_nothing_but_the_answer() -> None:
    async def main() -> None:
        shared = SharedLook(Daemon())
        loop = asyncio.get_running_loop()
        for _ in range(3):
            began_at = loop.time()
            await shared.look()
            assert loop.time() - began_at == pytest.approx(ANSWER_S)
            await asyncio.sleep(PAUSE_S)

    virtual_time.run(main())


def test_failure_and_end_of_the_one_that_asks_are_its_own() -> None:
    async def main() -> None:
        shared = SharedLook(Daemon(num_failures=1))
        failing, cancelled, *others = [asyncio.create_task(shared.look()) for _ in range(6)]
        with pytest.raises(ControlError):
            await failing
        await asyncio.sleep(PAUSE_S / 2)
        cancelled.cancel()
        async with asyncio.timeout(2 * PAUSE_S):
            assert await asyncio.gather(*others) == [{}] * 4

    virtual_time.run(main())
