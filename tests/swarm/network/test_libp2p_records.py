"""The record DHT with a peer that lies, on real hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.network_worlds import libp2p_node
from swarm.network import partition_watch
from swarm.network.dht import known_peers, routing_table
from swarm.network.libp2p import p2pd_process
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.libp2p_network import (
    Libp2pNetwork,
)
from swarm.network.peer_budgets import MAX_UNARY_BYTES
from swarm_protocol import limits
from swarm_protocol.dht_messages import FindRequest, FindResponse, Found, StoreRequest, StoreResponse, dht_id_of
from swarm_protocol.envelope import seal_record
from swarm_protocol.errors import PeerTimeout, PeerUnreachable
from swarm_protocol.identity import Identity
from swarm_protocol.version import PROTOCOL_VERSION

KEY = "nodes/3"
PREFIX = f"/swarm/{PROTOCOL_VERSION}/test/dht/"
PING = FindRequest(addrs=("/ip4/127.0.0.1/tcp/1",)).to_bytes()


@pytest.fixture(autouse=True)
def nobody_is_asked_unless_a_test_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop routine checks: a lone node asks every peer that connects, and suspects those that have no answer yet."""
    monkeypatch.setattr(partition_watch, "MIN_PAUSE_S", 600.0)


class Liar:
    """A host with its own key in the DHT of honest peers, which answers as the test says."""

    def __init__(self, identity: Identity, host: Host, victim: str) -> None:
        self.identity = identity
        self.host = host
        self.answer: bytes | None = FindResponse(found=(Found(),)).to_bytes()  # None: never
        self.num_asked = 0
        self._victim = victim

    async def call(self, method: str, request: bytes) -> bytes:
        return await self.host.call(self._victim, PREFIX + method, request)

    async def store(self, record: bytes) -> bool:
        """Ask the victim to store `record`."""
        answer = await self.call("store", StoreRequest(record=record).to_bytes())
        return StoreResponse.from_bytes(answer).held

    def tell(self, *records: bytes) -> None:
        """Answer each request with these records under its only key."""
        self.answer = FindResponse(found=(Found(records=records),)).to_bytes()

    async def answer_find(self, _peer_id: str, _request: bytes) -> bytes:
        self.num_asked += 1
        return await _silent("", b"") if self.answer is None else self.answer

    async def answer_store(self, _peer_id: str, _request: bytes) -> bytes:
        return StoreResponse(held=True).to_bytes()


Case = Callable[[Libp2pNetwork], Coroutine[Any, Any, None]]
BesideHonest = Callable[[Case], None]


@pytest.fixture(scope="module")
def beside_honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BesideHonest]:
    """Run cases beside one honest node, which has met the liars of earlier cases."""
    with asyncio.Runner() as runner:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partition_watch, "MIN_PAUSE_S", 600.0)
            honest = runner.run(libp2p_node(tmp_path_factory.mktemp("honest") / "honest"))
        yield lambda case: runner.run(case(honest))
        runner.run(honest.close())


@asynccontextmanager
async def liar_beside(honest: Libp2pNetwork, identity_path: Path) -> AsyncIterator[Liar]:
    identity = Identity.load_or_create(identity_path)
    host = await Host.start(DaemonOptions(identity_path=identity_path, listen=("/ip4/127.0.0.1/tcp/0",)))
    running = asyncio.create_task(host.unary.run())
    liar = Liar(identity, host, honest.peer_id)
    await host.serve(f"{PREFIX}find", liar.answer_find)
    await host.serve(f"{PREFIX}store", liar.answer_store)
    (addr,) = await honest.addrs()
    try:
        await host.control.connect(honest.peer_id, [addr.partition("/p2p/")[0]])
        assert await liar.call("find", PING)
        assert identity.peer_id in honest._dht.peers()
        yield liar
    finally:
        await host.stop()
        await running


def signed(identity: Identity, payload: bytes, issued_at: float, *, key: str = KEY) -> bytes:
    envelope = seal_record(
        identity, network_id="test", key=key, payload=payload, issued_at=issued_at, lifetime_s=limits.RECORD_LIFETIME_S
    )
    return envelope.to_bytes()


async def payloads(network: Libp2pNetwork) -> list[bytes]:
    return sorted(envelope.payload for envelope in await network.lookup([KEY], timeout_s=30))


def test_lying_peer_cannot_place_or_replace_records(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            await libp2p_node(tmp_path / "a") as a,
            await libp2p_node(tmp_path / "b", peers=await a.addrs()) as b,
            liar_beside(a, tmp_path / "liar") as liar,
        ):
            assert await b.publish(KEY, b"honest", lifetime_s=60)
            num_refused, now = a.dht_counts.num_refused, time.time()
            forged = signed(liar.identity, b"forged", now + 1)
            assert not await liar.store(b"unsigned")
            assert not await liar.store(
                forged.replace(liar.identity.public_key, Identity.load(tmp_path / "b").public_key)
            )
            assert not await liar.store(forged[:-1] + bytes([forged[-1] ^ 1]))
            assert not await liar.store(signed(liar.identity, b"x", now + limits.MAX_CLOCK_SKEW_S + 5))
            assert a.dht_counts.num_refused == num_refused + 4
            # under the key that was signed, and no other
            assert await liar.store(signed(liar.identity, b"elsewhere", now, key="other"))
            assert await payloads(a) == await payloads(b) == [b"honest"]
            # it may publish its own record, and hides nobody by it
            assert await liar.store(forged)
            assert await payloads(a) == await payloads(b) == [b"forged", b"honest"]

    asyncio.run(main())


def test_replayed_record_does_not_displace_its_successor(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            await libp2p_node(tmp_path / "a") as a,
            await libp2p_node(tmp_path / "b", peers=await a.addrs()) as b,
            liar_beside(a, tmp_path / "liar") as liar,
        ):
            await b.publish(KEY, b"old", lifetime_s=60)
            (old,) = await a.lookup([KEY], timeout_s=30)
            await b.publish(KEY, b"new", lifetime_s=60)
            assert not await liar.store(old.to_bytes())
            liar.tell(old.to_bytes())
            assert await payloads(a) == [b"new"]
            assert liar.num_asked > 0

    asyncio.run(main())


def test_answer_with_forged_records_does_not_hide_the_honest_ones(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            await libp2p_node(tmp_path / "a") as a,
            liar_beside(a, tmp_path / "liar") as liar,
        ):
            await a.publish(KEY, b"honest", lifetime_s=60)
            async with await libp2p_node(tmp_path / "c", peers=await a.addrs()) as c:
                assert await c.publish(KEY, b"also honest", lifetime_s=60)
                forged = signed(liar.identity, b"forged", time.time())
                liar.tell(b"unsigned", forged[:-1], signed(liar.identity, b"x", time.time(), key="other"))
                assert await payloads(a) == await payloads(c) == [b"also honest", b"honest"]
                assert liar.num_asked > 0

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x01\xff",
        b"\x02",
        FindResponse().to_bytes(),  # to a requested key
        FindResponse(found=(Found(), Found())).to_bytes(),
        bytes(1) * (limits.MAX_FIND_RESPONSE_BYTES + 1),
    ],
    ids=["nothing", "malformed", "another version", "too few", "too many", "too long"],
)
def test_peer_with_malformed_answers_is_dropped_and_not_asked_for_a_while(
    beside_honest: BesideHonest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    for name in ("SUSPECT_S", "MAX_SUSPECT_S"):
        monkeypatch.setattr(routing_table, name, 600.0)  # also on a machine that is busy for long
    # the liar's daemon sends longer answers
    monkeypatch.setattr(p2pd_process, "MAX_UNARY_MESSAGE_BYTES", 2 * len(answer) + 2**16)

    async def case(a: Libp2pNetwork) -> None:
        await a.publish(KEY, b"honest", lifetime_s=60)  # before any peer could be slow to take it
        async with liar_beside(a, tmp_path / "liar") as liar:
            liar.answer, liar.num_asked = answer, 0
            assert await payloads(a) == [b"honest"]
            assert liar.num_asked == 1
            assert liar.identity.peer_id not in a._dht.peers()
            assert await liar.call("find", PING)  # it calls, and is a member again
            assert liar.identity.peer_id in a._dht.peers()
            await payloads(a)
            assert liar.num_asked == 1

    beside_honest(case)


def test_malformed_request_gets_no_answer_and_makes_nobody_a_member(
    beside_honest: BesideHonest, tmp_path: Path
) -> None:
    async def case(a: Libp2pNetwork) -> None:
        async with liar_beside(a, tmp_path / "liar") as liar:
            for method in ("find", "store"):
                a._dht.known.table.lost(liar.identity.peer_id)
                assert await liar.call(method, b"\x01\xff") == b""
                assert liar.identity.peer_id not in a._dht.peers()

    beside_honest(case)


def test_peer_with_a_key_that_no_node_has_never_becomes_a_member(beside_honest: BesideHonest) -> None:
    async def case(a: Libp2pNetwork) -> None:
        before = set(a._dht.peers())
        assert not await a._dht.ping("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")  # of an RSA key
        assert set(a._dht.peers()) <= before

    beside_honest(case)


def test_failing_answer_is_an_error_for_its_caller_and_leaves_the_node_working(
    beside_honest: BesideHonest, tmp_path: Path
) -> None:
    async def fail(_peer_id: str, _request: bytes) -> bytes:
        raise ZeroDivisionError

    async def case(a: Libp2pNetwork) -> None:
        async with liar_beside(a, tmp_path / "liar") as liar:
            await a._host.serve(f"{PREFIX}broken", fail)
            with pytest.raises(PeerUnreachable, match="broke off"):
                await liar.call("broken", b"")
            assert await liar.call("find", PING)

    beside_honest(case)


def test_answer_has_the_records_that_fit_and_the_next_one_has_the_rest(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            await libp2p_node(tmp_path / "a") as a,
            await libp2p_node(tmp_path / "b", peers=await a.addrs()) as b,
        ):
            keys = [f"nodes/{number}" for number in range(6)]
            large = bytes(limits.MAX_RECORD_BYTES)
            signers = [Identity.generate() for _ in range(120)]
            records = {signed(signer, large, time.time(), key=key) for signer in signers for key in keys}
            for record in records:
                envelope = a._dht._validator.envelope(record)
                assert envelope is not None
                assert a._dht._storage.store(envelope, record)
            request = FindRequest(keys=tuple(map(dht_id_of, keys)))
            answer = await b._host.call(a.peer_id, f"{PREFIX}find", request.to_bytes())
            assert len(answer) <= MAX_UNARY_BYTES
            cut = FindResponse.from_bytes(answer)
            assert cut.is_cut
            assert set(cut.found[0].records) < records
            whole = await b._methods.call_streamed(
                a.peer_id,
                f"{PREFIX}find_whole",
                request.to_bytes(),
                timeout_s=30,
                max_bytes=limits.MAX_FIND_RESPONSE_BYTES,
            )
            assert len(FindResponse.from_bytes(whole).found) == 4
            found = await b.lookup(keys, timeout_s=30)
            assert {envelope.to_bytes() for envelope in found} == records

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
        async with (
            await libp2p_node(tmp_path / "a") as a,
            await libp2p_node(tmp_path / "b", peers=await a.addrs()) as b,
        ):
            monkeypatch.setattr(known_peers, "RPC_TIMEOUT_S", 30)
            a._host.unary._answers[f"{PREFIX}find"] = _silent
            with pytest.raises(PeerTimeout):
                await b.lookup([KEY], timeout_s=0.3)

    asyncio.run(main())


def test_peer_that_hangs_costs_one_deadline_and_is_dropped(
    beside_honest: BesideHonest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(a: Libp2pNetwork) -> None:
        async with liar_beside(a, tmp_path / "liar") as liar:
            await a.publish(KEY, b"honest", lifetime_s=60)
            monkeypatch.setattr(known_peers, "RPC_TIMEOUT_S", 0.2)
            liar.answer = None
            assert await payloads(a) == [b"honest"]
            assert liar.identity.peer_id not in a._dht.peers()

    beside_honest(case)


async def _silent(_peer_id: str, _request: bytes) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError
