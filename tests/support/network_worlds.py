"""Where the conformance suite runs: two nodes of each implementation, or two that only a relay connects; and how to run
a coroutine there.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import uvloop
from swarm.network.interface import Network
from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.network.peer_budgets import UnreadBudget
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused, PeerUnreachable
from swarm_protocol.identity import Identity


class World(Protocol):
    @property
    def a(self) -> Network: ...

    @property
    def b(self) -> Network: ...

    def name(self) -> str:
        """A method or key that nothing else uses."""

    async def spawn(self, *, alone: bool = False) -> Network:
        """One more node; `alone`: the first of a network of its own. Its caller closes it."""

    def unread(self, network: Network) -> UnreadBudget:
        """The budget of what waits unread at a node."""

    async def replace_path(self) -> None:
        """Break what carries bytes between `a` and `b`; another path is there at once."""


Case = Callable[[World], Coroutine[Any, Any, None]]
Run = Callable[[Case], None]


class MemoryWorld:
    def __init__(self) -> None:
        self._names = itertools.count()
        self._internet = MemoryInternet(seed=1)
        self.a: Network = self._internet.network()
        self.b: Network = self._internet.network()

    def name(self) -> str:
        return f"n{next(self._names)}"

    async def spawn(self, *, alone: bool = False) -> Network:
        return self._internet.network(network_id="alone" if alone else "test")

    def unread(self, network: Network) -> UnreadBudget:
        return cast("MemoryNetwork", network).unread

    async def replace_path(self) -> None:
        self._internet.replace_path(self.a.peer_id, self.b.peer_id)


def run_in_memory(case: Case) -> None:
    async def main() -> None:
        world = MemoryWorld()
        await case(world)
        await world.a.close()
        await world.b.close()

    virtual_time.run(main())


class Libp2pWorld:
    def __init__(self, folder: Path) -> None:
        self._names = itertools.count()
        self._folder = folder
        self.a: Libp2pNetwork
        self.b: Libp2pNetwork

    async def open(self) -> None:
        self.a = await self.spawn(alone=True)
        self.b = await self.spawn()

    async def close(self) -> None:
        await self.b.close()
        await self.a.close()

    def name(self) -> str:
        return f"n{next(self._names)}"

    def unread(self, network: Network) -> UnreadBudget:
        return cast("Libp2pNetwork", network)._host.unread

    async def replace_path(self) -> None:
        async def is_connected() -> bool:
            return self.b.peer_id in await self.a._host.connected_peers()

        await eventually(is_connected)
        await self.a._host.control.disconnect(self.b.peer_id)

    async def spawn(self, *, alone: bool = False) -> Libp2pNetwork:
        peers = () if alone else await self.a.addrs()
        return await libp2p_node(self._folder / self.name(), peers=peers)


class RelayedWorld(Libp2pWorld):
    """None of its nodes listens anywhere: every connection between them goes through their relay."""

    async def open(self) -> None:
        self._spawned: list[Network] = []
        self.relay = await libp2p_node(self._folder / "relay", relay="serve")
        self.a = await self.spawn()
        self.b = await self.spawn()

    async def close(self) -> None:
        await super().close()
        await eventually(self._carries_nothing)
        await self.relay.close()

    async def _carries_nothing(self) -> bool:
        counts = self.relay.relay_counts
        return (counts.reservations, counts.circuits) == (0, 0)

    async def spawn(self, *, alone: bool = False) -> Libp2pNetwork:
        if alone:
            return await super().spawn(alone=True)
        peers = await self.relay.addrs()
        node = await libp2p_node(self._folder / self.name(), peers=peers, listen=(), relay="use")
        for other in self._spawned[:2]:  # whose daemon may have dialled too soon, and then pauses before it tries again
            await eventually(partial(_reaches, other, node.peer_id))
        self._spawned.append(node)
        return node


async def _reaches(network: Network, peer_id: str) -> bool:
    try:
        await network.call(peer_id, "nonesuch", b"", timeout_s=30)
    except PeerUnreachable:
        return False
    except PeerRefused:
        return True
    raise AssertionError("somebody serves nonesuch")


@contextmanager
def libp2p_runner(world: Libp2pWorld) -> Iterator[Run]:
    """One event loop and the same hosts for many cases."""

    async def run(case: Case) -> None:
        # the case before may have ended with its path just replaced, and a daemon then pauses before it dials again
        await eventually(partial(_reaches, world.b, world.a.peer_id))
        await eventually(partial(_reaches, world.a, world.b.peer_id))
        await case(world)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(world.open())
        yield lambda case: runner.run(run(case))
        runner.run(world.close())


async def libp2p_node(identity_path: Path, *, network_id: str = "test", **options: Any) -> Libp2pNetwork:
    Identity.load_or_create(identity_path)
    return await Libp2pNetwork.create(Libp2pOptions(identity_path=identity_path, network_id=network_id, **options))


async def eventually(condition: Callable[[], Awaitable[bool]], *, timeout_s: float = 60.0) -> float:
    """Seconds until `condition` held. Fails the test if it never does."""
    start = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)
    return time.monotonic() - start
