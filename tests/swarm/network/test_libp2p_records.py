"""The record DHT under a peer that lies, with real hosts and hivemind's own client in the liar's hands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from network_worlds import libp2p_node
from swarm.network.libp2p import Libp2pNetwork
from swarm.network.libp2p_daemon import DaemonOptions
from swarm.network.libp2p_dht import LaneTransport, node_id_of
from swarm.network.libp2p_host import Host
from swarm.network.record_validator import dht_expiration
from swarm_protocol import limits
from swarm_protocol.errors import PeerTimeout
from swarm_protocol.identity import Identity
from swarm_protocol.signed_record import seal_record
from swarm_protocol.version import PROTOCOL_VERSION

pytestmark = pytest.mark.usefixtures("identities_are_free")

KEY = "nodes/3"


class Liar:
    """A host with its own key and hivemind's unguarded DHT node, in the same DHT as honest peers."""

    def __init__(self, identity: Identity, node: DHTNode, victim: str) -> None:
        self.identity = identity
        self._node = node
        self._victim = PeerID.from_base58(victim)

    async def store(
        self, value: bytes, *, subkey: str | None = None, expires_at: float = 0.0, cache: bool = False
    ) -> bool:
        """Ask the victim directly to store a value under KEY."""
        packed = self._node.protocol.serializer.dumps(value)
        stored = await self._node.protocol.call_store(
            self._victim,
            keys=[DHTID.generate(source=KEY)],
            values=[packed],
            expiration_time=expires_at or time.time() + 60,
            subkeys=[subkey],
            in_cache=cache,
        )
        return bool(stored and stored[0])

    async def store_dictionary(self, entries: dict[str, tuple[bytes, float]]) -> bool:
        dictionary = DictionaryDHTValue()
        for subkey, (value, expires_at) in entries.items():
            dictionary.store(subkey, self._node.protocol.serializer.dumps(value), expires_at)
        stored = await self._node.protocol.call_store(
            self._victim, keys=[DHTID.generate(source=KEY)], values=[dictionary], expiration_time=time.time() + 60
        )
        return bool(stored and stored[0])

    def keep(self, value: bytes, *, subkey: str, expires_at: float) -> None:
        """Have this to answer whoever asks us."""
        packed = self._node.protocol.serializer.dumps(value)
        self._node.protocol.storage.store_subkey(DHTID.generate(source=KEY), subkey, packed, expires_at)


@asynccontextmanager
async def liar_beside(honest: Libp2pNetwork, identity_path: Path) -> AsyncIterator[Liar]:
    identity = Identity.load_or_create(identity_path)
    host = await Host.start(DaemonOptions(identity_path=identity_path, listen=("/ip4/127.0.0.1/tcp/0",)))
    lane = asyncio.create_task(host.lane.run())
    (addr,) = await honest.addrs()
    await host.control.connect(honest.peer_id, [addr.partition("/p2p/")[0]])
    prefix = f"/swarm/{PROTOCOL_VERSION}/test/dht/"
    node = await DHTNode.create(
        p2p=LaneTransport(host, prefix),
        node_id=node_id_of(identity.peer_id),
        cache_locally=False,
    )
    await node.protocol.call_ping(PeerID.from_base58(honest.peer_id))
    yield Liar(identity, node, honest.peer_id)
    await host.stop()
    await lane


def signed(identity: Identity, payload: bytes, issued_at: float, *, key: str = KEY) -> bytes:
    envelope = seal_record(
        identity, network_id="test", key=key, payload=payload, issued_at=issued_at, lifetime_s=limits.RECORD_LIFETIME_S
    )
    return envelope.to_bytes()


async def payloads(network: Libp2pNetwork) -> list[bytes]:
    return sorted(envelope.payload for envelope in await network.lookup([KEY], timeout_s=5))


def test_lying_peer_cannot_place_or_replace_records(tmp_path: Path) -> None:
    async def main() -> None:
        a = await libp2p_node(tmp_path / "a")
        b = await libp2p_node(tmp_path / "b", peers=await a.addrs())
        async with liar_beside(a, tmp_path / "liar") as liar:
            assert await b.publish(KEY, b"honest", lifetime_s=60)
            now = time.time()
            forged = signed(liar.identity, b"forged", now + 1)
            drop_at, me = dht_expiration(now + 1), liar.identity.peer_id
            assert not await liar.store(b"unsigned", subkey=me)
            assert not await liar.store(forged, subkey=b.peer_id, expires_at=drop_at)
            assert not await liar.store(forged, subkey=me, expires_at=drop_at + 100)
            assert not await liar.store(forged, subkey=None, expires_at=drop_at)
            assert not await liar.store(b"cached", subkey=None, expires_at=drop_at, cache=True)
            assert not await liar.store(signed(liar.identity, b"x", now, key="other"), subkey=me, expires_at=drop_at)
            assert not await liar.store_dictionary({me: (forged, drop_at), b.peer_id: (forged, drop_at)})
            assert await payloads(a) == await payloads(b) == [b"honest"]
            # its own record is its right, and hides nobody, in the cache neither
            assert await liar.store(forged, subkey=me, expires_at=drop_at, cache=True)
            assert await payloads(a) == await payloads(b) == [b"forged", b"honest"]
        await b.close()
        await a.close()

    asyncio.run(main())


def test_replayed_record_does_not_bring_back_what_was_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        a = await libp2p_node(tmp_path / "a")
        b = await libp2p_node(tmp_path / "b", peers=await a.addrs())
        async with liar_beside(a, tmp_path / "liar") as liar:
            await b.publish(KEY, b"old", lifetime_s=60)
            (old,) = await a.lookup([KEY], timeout_s=5)
            await b.publish(KEY, b"new", lifetime_s=60)
            drop_at = dht_expiration(old.issued_at)
            assert not await liar.store(old.to_bytes(), subkey=b.peer_id, expires_at=drop_at)
            assert not await liar.store(old.to_bytes(), subkey=b.peer_id, expires_at=drop_at + 60)
            liar.keep(old.to_bytes(), subkey=b.peer_id, expires_at=drop_at)
            assert await payloads(a) == [b"new"]
        await b.close()
        await a.close()

    asyncio.run(main())


def test_answer_with_a_forged_record_does_not_hide_the_honest_ones(tmp_path: Path) -> None:
    async def main() -> None:
        a = await libp2p_node(tmp_path / "a")
        async with liar_beside(a, tmp_path / "liar") as liar:
            await a.publish(KEY, b"honest", lifetime_s=60)
            async with await libp2p_node(tmp_path / "c", peers=await a.addrs()) as c:
                assert await c.publish(KEY, b"also honest", lifetime_s=60)
                drop_at = dht_expiration(time.time())
                liar.keep(b"unsigned", subkey=liar.identity.peer_id, expires_at=drop_at)
                liar.keep(signed(liar.identity, b"forged", time.time()), subkey=c.peer_id, expires_at=drop_at + 1e9)
                assert await payloads(a) == await payloads(c) == [b"also honest", b"honest"]
        await a.close()

    asyncio.run(main())


def test_networks_that_share_a_host_never_mix_their_records(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            await libp2p_node(tmp_path / "a", network_id="one") as one,
            await libp2p_node(tmp_path / "b", network_id="two") as two,
        ):
            addr = (await one.addrs())[0].partition("/p2p/")[0]
            await two._host.control.connect(one.peer_id, [addr])
            assert not await two._dht.ping(one.peer_id)
            assert not await two.publish(KEY, b"two", lifetime_s=60)
            assert await payloads(one) == []

    asyncio.run(main())


def test_lookup_that_nobody_answers_raises_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        a = await libp2p_node(tmp_path / "a")
        async with await libp2p_node(tmp_path / "b", peers=await a.addrs()) as b:
            monkeypatch.setattr(b._dht._protocol, "wait_timeout", 30)

            async def silent(*_args: object) -> None:
                await asyncio.Event().wait()

            monkeypatch.setattr(a._dht._protocol, "rpc_find", silent)
            monkeypatch.setattr(b._dht._protocol, "call_find", silent)
            with pytest.raises(PeerTimeout):
                await b.lookup([KEY], timeout_s=0.3)
        await a.close()

    asyncio.run(main())
