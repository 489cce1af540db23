"""One node of a simulated world, from its start to its end. Its state belongs to the world's loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarm_protocol.identity import Identity
from swarm_protocol.records import NodeRecord

from swarm.network.membership import Membership
from swarm.network.memory.memory_network import EPOCH_S, MemoryNetwork
from swarm.network.partition_watch import REFRESH_S
from swarm.simulation.scenario import NodeClass
from swarm.simulation.simulated_host import SimulatedHost
from swarm.simulation.simulated_network import SimulatedNetwork
from swarm.simulation.simulated_serving import SimulatedServer


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedNode:
    """`network` and `membership` are None until it has joined."""

    number: int
    kind: NodeClass
    identity: Identity
    host: SimulatedHost
    joined_at: float
    network: SimulatedNetwork | None = None
    membership: Membership | None = None
    streams: MemoryNetwork | None = None
    server: SimulatedServer | None = None
    task: asyncio.Task[None] | None = None
    base: tuple[int, int] = (0, 0)
    """Messages and bytes that it had sent when the measurement began."""

    @property
    def record(self) -> NodeRecord:
        """Return the record in which it tells of itself."""
        memory_bytes = int(self.kind.memory_gib * 2**30)
        return NodeRecord(
            name=f"node-{self.number}",
            version="simulated",
            addrs=(f"{addr_of(self.number)}/p2p/{self.identity.peer_id}",),
            device=self.kind.name[:64],
            memory_bytes=memory_bytes,
            free_memory_bytes=memory_bytes,
            reachability="relay" if self.host.place.nat.kind == "relayed" else "public",
            started_at=EPOCH_S + self.joined_at,
            role="volunteer",
        )


def addr_of(number: int) -> str:
    """Return the address at which a node can be dialled, without its id."""
    return f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/4001"


async def tend_table(network: SimulatedNetwork) -> None:
    """Do as `partition_watch.PartitionWatch` does while all is well."""
    while True:
        await asyncio.sleep(REFRESH_S)
        await network.dht.make_room()
        await network.dht.tend()
