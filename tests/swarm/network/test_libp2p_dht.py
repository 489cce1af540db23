"""Searches among peers that are silent, in virtual time: nodes of the DHT that call each other without a network."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from swarm.network.libp2p_dht import RPC_TIMEOUT_S, SEARCH_TIMEOUT_S, RecordDht
from swarm.network.record_validator import RecordValidator
from swarm.testing import virtual_time
from swarm_protocol.dht_messages import FindRequest, FindResponse, Found
from swarm_protocol.envelope import Envelope
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.identity import Identity, peer_id_of
from swarm_protocol.signed_record import seal_record

NOW = 1_700_000_000.0
KEY = "nodes/3"
ASKER, HONEST, LIAR = (Identity(bytes([number]) * 32) for number in (1, 2, 3))


class Host:
    """Of one node. `wire` has the answers of all who give any; whoever is not in it is silent."""

    def __init__(self, peer_id: str, wire: dict[tuple[str, str], Any]) -> None:
        self.peer_id = peer_id
        self._wire = wire

    async def serve(self, protocol: str, answer: Any) -> None:
        self._wire[self.peer_id, protocol] = answer

    async def call(self, peer_id: str, protocol: str, request: bytes) -> bytes:
        if (peer_id, protocol) not in self._wire:
            await asyncio.sleep(2 * RPC_TIMEOUT_S)
            raise PeerUnreachable("no answer", peer_id=peer_id)
        return await self._wire[peer_id, protocol](self.peer_id, request)


class World:
    def __init__(self) -> None:
        self.wire: dict[tuple[str, str], Any] = {}

    async def node(self, identity: Identity) -> RecordDht:
        host: Any = Host(identity.peer_id, self.wire)
        return await RecordDht.create(host, "", RecordValidator("test", lambda: NOW))

    def add_liar(self, asker: RecordDht) -> None:
        """It names ten peers for each key, always others, of which none is there."""
        num_named = 0

        async def answer(_peer_id: str, request: bytes) -> bytes:
            nonlocal num_named
            found = []
            for _ in FindRequest.from_bytes(request).keys:
                named = range(num_named, num_named := num_named + 10)
                found.append(Found(peers=tuple(peer_id_of(hashlib.sha256(b"%d" % each).digest()) for each in named)))
            return FindResponse(found=tuple(found)).to_bytes()

        self.wire[LIAR.peer_id, "find"] = answer
        asker._table.heard_of(LIAR.peer_id)


def record(identity: Identity, key: str = KEY) -> Envelope:
    return seal_record(identity, network_id="test", key=key, payload=b"", issued_at=NOW, lifetime_s=60)


def test_find_whose_time_ends_among_silent_peers_gives_what_others_said() -> None:
    async def main() -> None:
        world = World()
        asker, honest = await world.node(ASKER), await world.node(HONEST)
        keys = [f"nodes/{shard}" for shard in range(8)]
        for key in keys:
            honest._storage.store(record(HONEST, key), record(HONEST, key).to_bytes())
        assert await asker.ping(HONEST.peer_id)
        world.add_liar(asker)
        begin = asyncio.get_running_loop().time()
        found, answered = await asker.find(keys, timeout_s=5)
        assert asyncio.get_running_loop().time() - begin == 5  # the silent are too many for it
        assert answered
        assert {envelope.subject for envelope in found} == set(keys)

    virtual_time.run(main())


def test_record_is_placed_in_time_with_those_that_answer() -> None:
    async def main() -> None:
        world = World()
        asker, honest = await world.node(ASKER), await world.node(HONEST)
        assert await asker.ping(HONEST.peer_id)
        world.add_liar(asker)
        for number in range(100, 150):  # more than are asked at once
            asker._table.heard_of(peer_id_of(hashlib.sha256(b"%d" % number).digest()))
        begin = asyncio.get_running_loop().time()
        assert await asker.store(record(ASKER))
        assert asyncio.get_running_loop().time() - begin <= SEARCH_TIMEOUT_S + RPC_TIMEOUT_S
        assert honest.counts.num_records == 1

    virtual_time.run(main())
