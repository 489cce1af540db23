"""Starts real `swarm-node` processes that serve one model on loopback, and an SDK client of them in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from swarm.client import AsyncClient
from swarm_node.demo.nodes import DemoState, EventFields, Fleet, NodeState

START_S = 120.0


class ServingFleet:
    """Add servers, kill them or ask them to leave while the client sends requests."""

    def __init__(self, fleet: Fleet, client: AsyncClient, seed: str, model: Path, options: Sequence[str]) -> None:
        self.fleet = fleet
        self.client = client
        self.state = fleet.state
        self._join = ("join", "--peers", seed, "--model", str(model), "--probe", "off", *options)
        self._model = model
        self._numbers = count(1)

    async def add(self, start: int, end: int, *options: str) -> NodeState:
        """Start a server of blocks `[start, end)`, which serves some seconds later."""
        name = f"node-{next(self._numbers)}"
        await self.fleet.spawn(name, *self._join, "--blocks", f"{start}:{end}", *options)
        return self.state.node(name)

    async def until_serving(self, *nodes: NodeState) -> None:
        """Wait until each server reports that it serves, and the client sees it."""
        await self.fleet.until(
            lambda: all(node.state == "serving" for node in nodes), within_s=START_S, what="starting servers"
        )
        async with asyncio.timeout(START_S):
            while not {node.peer_id for node in nodes} <= (await self.client.servers(self._model.name)).keys():
                self.fleet.check()
                await asyncio.sleep(0.05)

    def kill(self, node: NodeState) -> None:
        """Kill the server at once."""
        self.fleet.kill(node.name)

    def drain(self, node: NodeState) -> None:
        """Ask the server to drain."""
        leaving = self.fleet.processes[node.name]
        leaving.killed = True
        if not leaving.ended:
            leaving.process.terminate()

    def find(self, peer_id: str) -> NodeState:
        node = self.state.by_peer(peer_id)
        assert node is not None
        return node

    def starting(self) -> list[NodeState]:
        """Return the servers that were added and do not serve yet."""
        return [node for node in self.state.trainers if node.state in ("starting", "ready", "loading")]

    def alive(self, start: int, end: int) -> list[NodeState]:
        return [node for node in self.state.nodes.values() if node.span == (start, end) and node.state == "serving"]


@asynccontextmanager
async def serving_fleet(
    root: Path, model: Path, spans: Sequence[tuple[int, int]], *options: str
) -> AsyncIterator[ServingFleet]:
    """Yield a seed, a server for each of `spans`, and a client that sees them all."""
    state = DemoState(num_nodes=len(spans))
    async with Fleet(root, state, _unheard) as fleet:
        await fleet.spawn("seed", "seed")
        seed = state.node("seed")
        await fleet.until(lambda: bool(seed.addrs), within_s=START_S, what="starting the seed")
        async with AsyncClient.connect(peers=seed.addrs) as client:
            servers = ServingFleet(fleet, client, seed.addrs[0], model, options)
            await servers.until_serving(*[await servers.add(start, end) for start, end in spans])
            yield servers


def _unheard(_name: str, _event: EventFields) -> None:
    """Ignore an event that no test reads."""
