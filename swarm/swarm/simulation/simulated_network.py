"""Implements `Network` for a simulated node: the real record DHT over simulated hosts.

Calls use `simulated_host`, and streams the pipes of the memory network. Simulated nodes publish only valid records, so
no node parses a record or checks its signature: the publisher shares the envelope with all nodes (`SharedRecords`).
Records are therefore signed by a stub. What rounds sign is signed and checked for real.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable
from swarm_protocol.identity import SIGNATURE_BYTES, Identity
from swarm_protocol.records import NodeRecord

from swarm.network.dht.own_records import OwnRecords
from swarm.network.dht.record_dht import RecordDht
from swarm.network.dht.record_storage import RecordValidator
from swarm.network.interface import NotServed, SigningNetwork, Stream, StreamHandler, UnaryHandler, too_long
from swarm.network.link_meter import LinkMeter
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import EPOCH_S, MemoryNetwork
from swarm.network.partition_watch import REFRESH_S
from swarm.newest_items import NewestItems
from swarm.simulation.scenario import NodeClass
from swarm.simulation.simulated_host import SimulatedHost

NETWORK_ID = "simulated"
KEPT_RECORDS = 1 << 18
"""Number of newest records whose envelopes are kept: all that 10,000 nodes store in five minutes, the longest lifetime
of a record."""


class SharedRecords(RecordValidator):
    """The envelopes of the newest records, by their bytes, for all nodes."""

    def __init__(self) -> None:
        super().__init__(NETWORK_ID, lambda: EPOCH_S + asyncio.get_running_loop().time())
        self._envelopes = NewestItems[bytes, Envelope](KEPT_RECORDS)

    def add(self, envelope: Envelope, data: bytes) -> None:
        self._envelopes[data] = envelope

    def envelope(self, data: bytes) -> Envelope | None:
        return self._envelopes.get(data)


class _StubIdentity(Identity):
    """An identity whose signatures are digests, which nobody checks."""

    __slots__ = ()

    def sign(self, message: bytes) -> bytes:
        return hashlib.sha512(message).digest()[:SIGNATURE_BYTES]


class _SharingDht(RecordDht):
    """Shares each record with all nodes before it stores the record with some."""

    def __init__(self, host: SimulatedHost, prefix: str, records: SharedRecords) -> None:
        super().__init__(host, prefix, records)
        self._shared = records

    async def store(self, envelope: Envelope) -> bool:
        self._shared.add(envelope, envelope.to_bytes())
        return await super().store(envelope)


class SimulatedNetwork(SigningNetwork):
    """Implements `Network`. `streams` is this node on the memory network. Without it, the node has no streams."""

    def __init__(
        self, seed: bytes, host: SimulatedHost, records: SharedRecords, streams: MemoryNetwork | None = None
    ) -> None:
        super().__init__(_StubIdentity(seed), NETWORK_ID)
        self._shared = records
        self._streams = streams
        self.links = LinkMeter()
        self.host = host
        self.dht: RecordDht
        self._own_records: OwnRecords

    @classmethod
    async def join(
        cls,
        seed: bytes,
        host: SimulatedHost,
        records: SharedRecords,
        *,
        addr: str,
        entries: Sequence[str],
        streams: MemoryNetwork | None = None,
    ) -> SimulatedNetwork:
        """Return the network of a node that has contacted the peers `entries` and the nodes nearest to itself, as a
        real node does when it starts."""
        network = cls(seed, host, records, streams)
        network.dht = dht = _SharingDht(host, "dht/", records)
        await dht.serve()
        network._own_records = OwnRecords(dht, network._identity, NETWORK_ID, records.now, on_copy=lambda: None)
        network.dht.known.own_addrs = (addr,)
        await asyncio.gather(*(network.dht.ping(peer_id) for peer_id in entries))
        await network.dht.refresh()
        return network

    def now(self) -> float:
        return self._shared.now()

    async def call(
        self, peer_id: str, method: str, request: bytes, *, timeout_s: float, max_bytes: int = limits.MAX_MESSAGE_BYTES
    ) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                response = await self.host.call(peer_id, f"call/{method}", request)
        except TimeoutError:
            raise PeerTimeout(f"no answer to {method!r} within {timeout_s:g} s", peer_id=peer_id) from None
        except NotServed:
            raise PeerRefused(f"the peer does not serve {method!r}", peer_id=peer_id) from None
        if len(response) > max_bytes:
            raise too_long(max_bytes, peer_id)
        return response

    @asynccontextmanager
    async def stream(self, peer_id: str, method: str, *, timeout_s: float | None) -> AsyncIterator[Stream]:
        if self._streams is None:
            raise PeerUnreachable("this node has no streams", peer_id=peer_id)
        async with self._streams.stream(peer_id, method, timeout_s=timeout_s) as stream:
            yield stream

    async def serve(self, method: str, handler: UnaryHandler) -> None:
        self.host.serve_in_tasks(f"call/{method}", handler)

    async def serve_stream(self, method: str, handler: StreamHandler) -> None:
        if self._streams is not None:
            await self._streams.serve_stream(method, handler)

    def release(self, *methods: str) -> None:
        if self._streams is not None:
            self._streams.release(*methods)

    async def publish(self, key: str, payload: bytes, *, lifetime_s: float) -> bool:
        if not self.host.is_up:
            raise PeerUnreachable("this node has left", peer_id=self.peer_id)  # so it cannot withdraw its records
        return await self._own_records.publish(key, payload, lifetime_s=lifetime_s)

    async def lookup(self, keys: Sequence[str], *, timeout_s: float, max_records: int = 0) -> list[Envelope]:
        return await self._own_records.lookup(keys, timeout_s=timeout_s, max_records=max_records)

    def provider_of(self, peer_id: str) -> str:
        return peer_id

    async def addrs(self) -> tuple[str, ...]:
        return tuple(f"{addr}/p2p/{self.peer_id}" for addr in self.dht.known.own_addrs)

    async def close(self) -> None:
        if self._streams is not None:
            await self._streams.close()


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedNode:
    """One node. `network` and `membership` are None until it has joined, and `streams` is None unless it trains."""

    number: int
    kind: NodeClass
    identity: Identity
    host: SimulatedHost
    joined_at: float
    network: SimulatedNetwork | None = None
    membership: Membership | None = None
    streams: MemoryNetwork | None = None
    task: asyncio.Task[None] | None = None
    base: tuple[int, int] = (0, 0)
    """The numbers of messages and bytes that it had sent when the measurement began."""

    @property
    def addr(self) -> str:
        """Return the address of this node, without its peer id."""
        number = self.number
        return f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/4001"

    @property
    def record(self) -> NodeRecord:
        """Return the record of this node, as a volunteer publishes it."""
        memory_bytes = int(self.kind.memory_gib * 2**30)
        return NodeRecord(
            name=f"node-{self.number}",
            version="simulated",
            addrs=(f"{self.addr}/p2p/{self.identity.peer_id}",),
            device=self.kind.name[:64],
            memory_bytes=memory_bytes,
            free_memory_bytes=memory_bytes,
            reachability="relay" if self.host.place.nat.kind == "relayed" else "public",
            started_at=EPOCH_S + self.joined_at,
            role="volunteer",
        )


async def tend_table(network: SimulatedNetwork) -> None:
    """Refresh the routing table, as `partition_watch.PartitionWatch` does in a network without a partition."""
    while True:
        await asyncio.sleep(REFRESH_S)
        await network.dht.make_room()
        await network.dht.tend()
