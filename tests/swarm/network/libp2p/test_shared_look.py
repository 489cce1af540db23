"""Many callers that poll the connections query a scripted daemon as often as one caller, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from swarm.network.libp2p.daemon_control import Control, ControlError
from swarm.network.libp2p.host import CONNECTION_PAUSE_S, PAUSE_S, Connections, SharedLook
from swarm.testing import virtual_time

ANSWER_S = 0.001


class Daemon(Control):
    """A daemon that records queries, of which the first `num_failures` fail."""

    def __init__(self, num_failures: int = 0) -> None:
        super().__init__("")
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


@pytest.mark.parametrize("num_connections", [0, 2000])
def test_forty_polling_callers_query_the_daemon_as_often_as_one_and_more_rarely_about_many_connections(
    num_connections: int,
) -> None:
    pause_s = PAUSE_S + CONNECTION_PAUSE_S * num_connections

    async def main() -> None:
        daemon = Daemon()
        daemon.connections["stranger"] = num_connections * ("/ip4/192.0.2.8/tcp/4001",)
        shared = SharedLook(daemon)

        async def attempt() -> None:
            async with asyncio.timeout(4.0):
                while "peer" not in await shared.look():
                    await asyncio.sleep(0.02)

        attempts = [asyncio.create_task(attempt()) for _ in range(40)]
        await asyncio.sleep(3.0)
        daemon.connections["peer"] = ("/ip4/192.0.2.7/tcp/4001",)
        await asyncio.sleep(3 * pause_s + 0.02)
        assert all(each.done() for each in attempts)
        await asyncio.gather(*attempts)
        assert daemon.num_asked <= (3.0 + 3 * pause_s) / pause_s + 1

    virtual_time.run(main())


def test_answer_is_never_older_than_its_query() -> None:
    async def main() -> None:
        daemon = Daemon()
        shared = SharedLook(daemon)
        first = asyncio.create_task(shared.look())
        await asyncio.sleep(ANSWER_S / 2)  # it has been sent, and its answer is on its way
        daemon.connections["peer"] = ()
        assert "peer" in await shared.look()
        assert "peer" not in await first
        daemon.connections.clear()
        assert await shared.look() == {}

    virtual_time.run(main())


def test_occasional_query_waits_only_for_its_answer() -> None:
    async def main() -> None:
        shared = SharedLook(Daemon())
        loop = asyncio.get_running_loop()
        for _ in range(3):
            began_at = loop.time()
            await shared.look()
            assert loop.time() - began_at == pytest.approx(ANSWER_S)
            await asyncio.sleep(PAUSE_S)

    virtual_time.run(main())


def test_failure_or_cancellation_of_one_query_leaves_others_alone() -> None:
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
