"""Searches among silent peers, in virtual time: nodes of the DHT call each other without a network."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest
from swarm.network.dht import known_peers, routing_table, searches
from swarm.network.dht.known_peers import RPC_TIMEOUT_S
from swarm.network.dht.record_dht import BURST_S, CALLS_PER_S, NUM_NAMING, SEARCH_TIMEOUT_S, RecordDht
from swarm.network.dht.record_storage import RecordValidator
from swarm.network.dht.routing_table import (
    BUCKET_SIZE,
    MIN_CROWDED_S,
    NARROW_WIDTH,
    SAMPLE_WIDTH,
    WIDTH,
    node_id_of,
    to_id,
)
from swarm.network.dht.searches import MIN_HOLD_S, NUM_REPLICAS, WIDEN_S
from swarm.network.interface import too_many_calls
from swarm.testing import virtual_time
from swarm_protocol import limits
from swarm_protocol.dht_messages import Contact, FindRequest, FindResponse, Found, dht_id_of
from swarm_protocol.envelope import Envelope, seal_record
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.identity import Identity, peer_id_of

NOW = 1_700_000_000.0
KEY = "nodes/3"
ASKER, HONEST, LIAR, SOUGHT = (Identity(bytes([number]) * 32) for number in (1, 2, 3, 4))


def addr_of(identity: Identity) -> tuple[str, ...]:
    return (f"/ip4/192.0.2.{identity.public_key[0]}/tcp/4001",)


def numbered(number: int) -> Identity:
    return Identity(hashlib.sha256(b"%d" % number).digest())


def is_far(identity: Identity, other: Identity) -> bool:
    """Return whether each is in the farthest bucket of the other."""
    return (node_id_of(identity.peer_id) ^ node_id_of(other.peer_id)).bit_length() == 256


class Host:
    """The host of one node. `wire` has the answers of the nodes that answer; all others are silent."""

    def __init__(self, peer_id: str, wire: dict[tuple[str, str], Any]) -> None:
        self.peer_id = peer_id
        self._wire = wire
        self.dialled: dict[str, tuple[str, ...]] = {}

    async def serve(self, protocol: str, answer: Any) -> None:
        self._wire[self.peer_id, protocol] = answer

    async def call(
        self, peer_id: str, protocol: str, request: bytes, *, addrs: Sequence[str], timeout_s: float
    ) -> bytes:
        self.dialled[peer_id] = tuple(addrs)
        async with asyncio.timeout(timeout_s):
            if (peer_id, protocol) not in self._wire:
                await asyncio.sleep(2 * RPC_TIMEOUT_S)
                raise PeerUnreachable("no answer", peer_id=peer_id)
            return await self._wire[peer_id, protocol](self.peer_id, request)


class World:
    def __init__(self) -> None:
        self.wire: dict[tuple[str, str], Any] = {}
        self.hosts: dict[str, Host] = {}

    async def node(self, identity: Identity) -> RecordDht:
        self.hosts[identity.peer_id] = host = Host(identity.peer_id, self.wire)
        dht = RecordDht(cast("Any", host), "", RecordValidator("test", lambda: NOW))
        await dht.serve()
        dht.known.own_addrs = addr_of(identity)
        return dht

    def add_liar(self, asker: RecordDht, *, only_for: Collection[bytes] = ()) -> None:
        """Add a node that names ten other peers for each key, or `only_for` some keys, none of which exists."""
        num_named = 0

        async def answer(_peer_id: str, request: bytes) -> bytes:
            nonlocal num_named
            found = []
            for key in FindRequest.from_bytes(request).keys:
                num_lies = 10 if not only_for or key in only_for else 0
                lies = range(num_named, num_named := num_named + num_lies)
                made_up = [peer_id_of(hashlib.sha256(b"%d" % each).digest()) for each in lies]
                found.append(Found(peers=tuple(Contact(peer_id=peer_id) for peer_id in made_up)))
            return FindResponse(found=tuple(found)).to_bytes()

        self.wire[LIAR.peer_id, "find"] = answer
        asker.known.table.heard_of(LIAR.peer_id)


def record(identity: Identity, key: str = KEY) -> Envelope:
    return seal_record(identity, network_id="test", key=key, payload=b"", issued_at=NOW, lifetime_s=60)


def test_find_returns_the_answers_so_far_when_its_time_ends_among_silent_peers() -> None:
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
        assert asyncio.get_running_loop().time() - begin == 5  # there are more silent nodes than it can ask in time
        assert answered
        assert {envelope.subject for envelope in found} == set(keys)

    virtual_time.run(main())


def test_search_that_a_liar_fills_with_silent_peers_does_not_delay_others() -> None:
    async def main() -> None:
        world = World()
        asker, honest = await world.node(ASKER), await world.node(HONEST)
        honest._storage.store(record(HONEST), record(HONEST).to_bytes())
        assert await asker.ping(HONEST.peer_id)
        keys = [f"made up {number}" for number in range(8)]
        world.add_liar(asker, only_for=[dht_id_of(key) for key in keys])
        lied_to = asyncio.create_task(asker.find(keys, timeout_s=5))
        await asyncio.sleep(0.1)
        begin = asyncio.get_running_loop().time()
        found, _ = await asker.find([KEY], timeout_s=5)
        assert [each.peer_id for each in found] == [HONEST.peer_id]
        assert asyncio.get_running_loop().time() == begin
        await lied_to

    virtual_time.run(main())


def test_record_is_stored_in_time_with_the_nodes_that_answer() -> None:
    async def main() -> None:
        world = World()
        asker, honest = await world.node(ASKER), await world.node(HONEST)
        assert await asker.ping(HONEST.peer_id)
        world.add_liar(asker)
        for number in range(100, 150):  # more than are asked at once
            asker.known.table.heard_of(peer_id_of(hashlib.sha256(b"%d" % number).digest()))
        begin = asyncio.get_running_loop().time()
        assert await asker.store(record(ASKER))
        assert asyncio.get_running_loop().time() - begin <= SEARCH_TIMEOUT_S + RPC_TIMEOUT_S
        assert honest.counts.num_records == 1

    virtual_time.run(main())


def test_search_asks_nobody_after_its_caller_is_cancelled() -> None:
    async def main() -> None:
        asker = await World().node(ASKER)
        for number in range(100, 140):  # all of them are silent, and they are more than are asked at first
            asker.known.table.heard_of(peer_id_of(hashlib.sha256(b"%d" % number).digest()))
        asked = asker._host.dialled  # type: ignore[attr-defined]
        storing = asyncio.create_task(asker.store(record(ASKER)))
        await asyncio.sleep(WIDEN_S / 2)
        storing.cancel()
        num_asked = len(asked)
        assert num_asked == NARROW_WIDTH
        await asyncio.sleep(2 * WIDEN_S)
        assert len(asked) == num_asked

    virtual_time.run(main())


def test_search_asks_nobody_more_when_its_last_answer_comes_as_it_would_widen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(searches, "WIDEN_S", 0.01)

    async def main() -> None:
        troubles: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, trouble: troubles.append(trouble))
        world = World()
        asker = await world.node(ASKER)
        for number in range(2 * SAMPLE_WIDTH):
            holder = await world.node(numbered(number))
            holder._storage.store(record(HONEST), record(HONEST).to_bytes())
            asker.known.table.heard_of(numbered(number).peer_id)
            answer = world.wire[numbered(number).peer_id, "find"]

            async def after_work(peer_id: str, request: bytes, answer: Any = answer) -> bytes:
                time.sleep(0.01)  # the loop is busy, and its timers are late
                return cast("bytes", await answer(peer_id, request))

            world.wire[numbered(number).peer_id, "find"] = after_work
        found, _ = await asker.find([KEY], timeout_s=5, max_records=1)
        await asyncio.sleep(0)
        assert len(found) == 1
        assert len(world.hosts[ASKER.peer_id].dialled) == SAMPLE_WIDTH
        assert troubles == []

    asyncio.run(main())


def test_addresses_of_a_peer_are_found_at_the_nodes_to_which_it_sent_them() -> None:
    async def main() -> None:
        world = World()
        asker, honest, sought = [await world.node(identity) for identity in (ASKER, HONEST, SOUGHT)]
        assert await sought.ping(HONEST.peer_id)
        assert await asker.ping(HONEST.peer_id)
        assert [list(addrs) async for addrs in asker.find_addrs(SOUGHT.peer_id)] == [list(addr_of(SOUGHT))]
        assert SOUGHT.peer_id not in world.hosts[ASKER.peer_id].dialled  # it cannot be dialled yet
        told = world.wire.pop((HONEST.peer_id, "find"))  # it is not asked again at once
        assert [list(addrs) async for addrs in asker.find_addrs(SOUGHT.peer_id)] == [list(addr_of(SOUGHT))]
        world.wire[HONEST.peer_id, "find"] = told
        assert await asker.ping(SOUGHT.peer_id, addr_of(SOUGHT))
        assert [addrs async for addrs in honest.find_addrs(SOUGHT.peer_id)] == [addr_of(SOUGHT)]

    virtual_time.run(main())


def test_addresses_of_a_peer_are_found_by_each_of_several_callers() -> None:
    """A reduction opens several streams to a member at the same time."""

    async def main() -> None:
        world = World()
        asker, _honest, sought = [await world.node(identity) for identity in (ASKER, HONEST, SOUGHT)]
        assert await sought.ping(HONEST.peer_id)
        assert await asker.ping(HONEST.peer_id)
        calls, answer = list[bytes](), world.wire[HONEST.peer_id, "find"]

        async def answer_slowly(peer_id: str, request: bytes) -> bytes:
            calls.append(request)
            await asyncio.sleep(0.5)
            return bytes(await answer(peer_id, request))

        world.wire[HONEST.peer_id, "find"] = answer_slowly

        async def find() -> list[tuple[str, ...]]:
            return [tuple(addrs) async for addrs in asker.find_addrs(SOUGHT.peer_id)]

        first = asyncio.create_task(find())
        await asyncio.sleep(0.1)
        others = [asyncio.create_task(find()) for _ in range(3)]
        await asyncio.sleep(0.1)
        first.cancel()  # the other callers do without its address
        assert await asyncio.gather(*others) == [[addr_of(SOUGHT)]] * 3
        assert len(calls) <= 3

    virtual_time.run(main())


def test_addresses_are_found_when_a_liar_answers_before_honest_nodes() -> None:
    async def main() -> None:
        world = World()
        asker, _honest, sought = [await world.node(identity) for identity in (ASKER, HONEST, SOUGHT)]
        assert await sought.ping(HONEST.peer_id)
        assert await asker.ping(HONEST.peer_id)
        truth, false = world.wire[HONEST.peer_id, "find"], ("/ip4/198.51.100.1/tcp/1",)

        async def answer_late(peer_id: str, request: bytes) -> bytes:
            await asyncio.sleep(0.5)
            return bytes(await truth(peer_id, request))

        async def lie(_peer_id: str, _request: bytes) -> bytes:
            return FindResponse(found=(Found(peers=(Contact(peer_id=SOUGHT.peer_id, addrs=false),)),)).to_bytes()

        world.wire[HONEST.peer_id, "find"], world.wire[LIAR.peer_id, "find"] = answer_late, lie
        asker.known.table.heard_of(LIAR.peer_id)
        found = [addrs async for addrs in asker.find_addrs(SOUGHT.peer_id)]
        assert found == [false, addr_of(SOUGHT)]

    virtual_time.run(main())


def test_node_whose_call_was_cancelled_by_a_liar_s_answer_is_asked_for_the_next_address() -> None:
    """Its call is cancelled before it begins."""

    async def main() -> None:
        world = World()
        asker, _honest = [await world.node(identity) for identity in (ASKER, HONEST)]
        assert await asker.ping(HONEST.peer_id)
        false, named = ("/ip4/198.51.100.1/tcp/1",), asyncio.Event()

        def naming(identity: Identity, addrs: tuple[str, ...]) -> bytes:
            return FindResponse(found=(Found(peers=(Contact(peer_id=identity.peer_id, addrs=addrs),)),)).to_bytes()

        async def name_a_node_that_knows(_peer_id: str, _request: bytes) -> bytes:
            named.set()
            return naming(numbered(7), addr_of(numbered(7)))

        async def know(_peer_id: str, _request: bytes) -> bytes:
            return naming(SOUGHT, addr_of(SOUGHT))

        async def lie(_peer_id: str, _request: bytes) -> bytes:
            await named.wait()
            return naming(SOUGHT, false)

        world.wire[HONEST.peer_id, "find"], world.wire[LIAR.peer_id, "find"] = name_a_node_that_knows, lie
        world.wire[numbered(7).peer_id, "find"] = know
        asker.known.table.heard_of(LIAR.peer_id)
        assert [addrs async for addrs in asker.find_addrs(SOUGHT.peer_id)] == [false, addr_of(SOUGHT)]

    virtual_time.run(main())


def test_addresses_from_a_liar_are_tried_beside_true_ones_and_passed_on_to_nobody() -> None:
    async def main() -> None:
        world = World()
        asker, _honest, sought = [await world.node(identity) for identity in (ASKER, HONEST, SOUGHT)]
        assert await sought.ping(HONEST.peer_id)
        assert await asker.ping(HONEST.peer_id)
        false = tuple(f"/ip4/198.51.100.{number}/tcp/1" for number in range(limits.MAX_CONTACT_ADDRS - 1))

        async def answer(_peer_id: str, request: bytes) -> bytes:
            named = Contact(peer_id=SOUGHT.peer_id, addrs=(*false, "/nothing/to/dial"))
            return FindResponse(
                found=tuple(Found(peers=(named,)) for _ in FindRequest.from_bytes(request).keys)
            ).to_bytes()

        world.wire[LIAR.peer_id, "find"] = answer
        asker.known.table.heard_of(LIAR.peer_id)
        await asker.refresh()
        dialled = world.hosts[ASKER.peer_id].dialled[SOUGHT.peer_id]
        assert set(dialled) == {*false, *addr_of(SOUGHT)}
        contacts = {contact.peer_id: contact.addrs for contact in asker.contacts()}
        assert contacts[SOUGHT.peer_id] == addr_of(SOUGHT)

    virtual_time.run(main())


def test_flood_of_newcomers_pushes_out_no_address_of_a_known_peer() -> None:
    async def main() -> None:
        world = World()
        honest, sought = await world.node(HONEST), await world.node(SOUGHT)
        assert await sought.ping(HONEST.peer_id)
        request = FindRequest(addrs=addr_of(LIAR)).to_bytes()
        for number in range(2 * routing_table.MAX_ADDRESSED):
            newcomer = peer_id_of(hashlib.sha256(b"%d" % number).digest())
            await honest._answer_find(newcomer, request)
        assert Contact(peer_id=SOUGHT.peer_id, addrs=addr_of(SOUGHT)) in honest.contacts()

    virtual_time.run(main())


def test_newcomer_is_found_when_the_node_that_it_joined_through_knows_many_killed_ones() -> None:
    async def main() -> None:
        world = World()
        seed = await world.node(HONEST)
        far = [each for each in map(numbered, range(200)) if is_far(each, HONEST)][: 3 * BUCKET_SIZE]
        for identity in far[:-1]:
            node = await world.node(identity)
            assert await node.ping(HONEST.peer_id)
            for method in ("find", "store"):
                del world.wire[identity.peer_id, method]
        newcomer, asker = await world.node(far[-1]), await world.node(ASKER)
        await asyncio.sleep(MIN_CROWDED_S)
        for _ in range(3 * BUCKET_SIZE):
            await asyncio.gather(newcomer.ping(HONEST.peer_id), asker.ping(HONEST.peer_id), seed.make_room())
        assert [addrs async for addrs in asker.find_addrs(far[-1].peer_id)] == [newcomer.known.own_addrs]

    virtual_time.run(main())


def test_checks_of_silent_members_leave_calls_to_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        world = World()
        asker, honest = await world.node(ASKER), await world.node(HONEST)
        honest._storage.store(record(HONEST), record(HONEST).to_bytes())
        assert await asker.ping(HONEST.peer_id)
        silent = [numbered(number).peer_id for number in range(2 * known_peers.NUM_PARALLEL_CALLS)]
        monkeypatch.setattr(asker.known.table, "crowded", lambda _now_s: silent)
        checking = asyncio.create_task(asker.make_room())
        await asyncio.sleep(0.1)
        assert silent[0] in world.hosts[ASKER.peer_id].dialled
        begin = asyncio.get_running_loop().time()
        found, _ = await asker.find([KEY], timeout_s=5)
        assert [each.peer_id for each in found] == [HONEST.peer_id]
        assert asyncio.get_running_loop().time() == begin, "the search must not wait for silent members"
        await checking
        assert set(silent) <= world.hosts[ASKER.peer_id].dialled.keys()

    virtual_time.run(main())


def test_node_that_only_asks_is_not_named_to_others() -> None:
    async def main() -> None:
        world = World()
        asker, honest = await world.node(ASKER), await world.node(HONEST)
        asker.known.own_addrs = ()
        assert await asker.ping(HONEST.peer_id)
        assert asker.peers() == (HONEST.peer_id,)
        assert honest.peers() == ()

    virtual_time.run(main())


@pytest.mark.parametrize("num_others", [3, 6])
def test_record_is_stored_again_without_a_search_until_a_holder_is_gone(num_others: int) -> None:
    async def main() -> None:
        world = World()
        others = [Identity(bytes([number]) * 32) for number in range(10, 10 + num_others)]
        nodes = [await world.node(identity) for identity in (ASKER, *others)]
        for node in nodes:
            for identity in (ASKER, *others):
                await node.ping(identity.peer_id)
        num_finds = 0

        def counted(answer: Any) -> Any:
            async def find(peer_id: str, request: bytes) -> bytes:
                nonlocal num_finds
                num_finds += 1
                return cast("bytes", await answer(peer_id, request))

            return find

        for identity in others:
            world.wire[identity.peer_id, "find"] = counted(world.wire[identity.peer_id, "find"])
        asker, envelope = nodes[0], record(ASKER)
        assert await asker.store(envelope)
        num_finds = 0
        assert await asker.store(envelope)
        assert num_finds == 0
        holder = next(each.peer_id for each, node in zip(others, nodes[1:], strict=True) if node.counts.num_records)
        world.wire = {place: answer for place, answer in world.wire.items() if place[0] != holder}
        for host in world.hosts.values():
            host._wire = world.wire
        assert await asker.store(envelope)  # the others still hold it
        assert await asker.store(envelope)
        assert num_finds > 0
        asker.forget_holders()
        num_finds = 0
        assert await asker.store(envelope)
        assert num_finds > 0

    virtual_time.run(main())


def test_newcomer_of_a_small_network_gets_the_next_publication_of_each_record() -> None:
    async def main() -> None:
        world = World()
        asker, *nodes = [await world.node(identity) for identity in (ASKER, HONEST, SOUGHT)]
        for identity in (HONEST, SOUGHT):
            assert await asker.ping(identity.peer_id)
        assert await asker.store(record(ASKER))
        assert await asker.store(record(ASKER))
        newcomer = await world.node(numbered(1))
        assert await newcomer.ping(ASKER.peer_id)
        assert await asker.store(record(ASKER))
        assert [node.counts.num_records for node in (*nodes, newcomer)] == [1, 1, 1]

    virtual_time.run(main())


def test_search_for_holders_is_postponed_once_however_many_holders_disappear_in_turn() -> None:
    async def main() -> None:
        world = World()
        others = list(map(numbered, range(20)))
        nodes = {each.peer_id: await world.node(each) for each in [ASKER, *others]}
        for each in others:
            assert await nodes[ASKER.peer_id].ping(each.peer_id)
            for other in others:
                assert each is other or await nodes[each.peer_id].ping(other.peer_id)
        asker, envelope = nodes.pop(ASKER.peer_id), record(ASKER)

        def holders() -> list[str]:
            return [peer_id for peer_id, node in nodes.items() if node.counts.num_records]

        assert await asker.store(envelope)
        assert len(holders()) == NUM_REPLICAS
        for num_living in (NUM_REPLICAS - 1, NUM_REPLICAS):
            gone = holders()[0]
            del nodes[gone]
            world.wire = {place: answer for place, answer in world.wire.items() if place[0] != gone}
            for host in world.hosts.values():
                host._wire = world.wire
            assert await asker.store(envelope)
            assert len(holders()) == num_living

    virtual_time.run(main())


def test_due_search_for_holders_asks_few_holders_and_finds_a_nearer_node() -> None:
    async def main() -> None:
        world = World()
        near = sorted(map(numbered, range(60)), key=lambda each: node_id_of(each.peer_id) ^ to_id(dht_id_of(KEY)))
        newcomer, *others = near[:20]
        asker, nodes = await world.node(ASKER), [await world.node(each) for each in others]
        for node in nodes:
            for identity in (ASKER, *others):
                assert identity.peer_id == node.known._host.peer_id or await node.ping(identity.peer_id)
        asked: list[str] = []
        for identity in others:
            answer = world.wire[identity.peer_id, "find"]

            async def find(peer_id: str, request: bytes, answer: Any = answer, own_id: str = identity.peer_id) -> bytes:
                asked.append(own_id)
                return cast("bytes", await answer(peer_id, request))

            world.wire[identity.peer_id, "find"] = find
        envelope = record(ASKER)
        assert await asker.store(envelope)
        assert len(asked) >= NUM_REPLICAS
        asked.clear()
        await asyncio.sleep(MIN_HOLD_S + 1)
        assert await asker.store(envelope)
        assert len(asked) == NUM_NAMING
        late = await world.node(newcomer)
        for identity in others:
            assert await late.ping(identity.peer_id)
        await asyncio.sleep(2 * MIN_HOLD_S + 1)
        assert await asker.store(envelope)
        assert late.counts.num_records == 1

    virtual_time.run(main())


def test_search_for_a_key_begins_where_the_last_one_ended() -> None:
    """The searcher's routing table leads only to HONEST, which then knows nobody any more."""

    async def main() -> None:
        world = World()
        asker, honest = await world.node(ASKER), await world.node(HONEST)
        others = [Identity(bytes([number]) * 32) for number in range(10, 16)]
        for identity in others:
            node = await world.node(identity)
            node._storage.store(record(identity), record(identity).to_bytes())
            assert await node.ping(HONEST.peer_id)
        assert await asker.ping(HONEST.peer_id)
        assert len((await asker.find([KEY], timeout_s=5))[0]) == len(others)
        for identity in others:
            asker.known.table.lost(identity.peer_id)
            honest.known.table.lost(identity.peer_id)
        assert len((await asker.find([KEY], timeout_s=5))[0]) == len(others)
        assert asker.last_hops == 1

    virtual_time.run(main())


def test_sample_of_records_asks_more_nodes_only_when_a_few_have_none() -> None:
    async def main() -> None:
        world = World()
        asker = await world.node(ASKER)
        num_finds = 0

        def counted(answer: Any) -> Any:
            async def find(peer_id: str, request: bytes) -> bytes:
                nonlocal num_finds
                num_finds += 1
                return cast("bytes", await answer(peer_id, request))

            return find

        signers, holders = ([Identity(bytes([kind, number]) * 16) for number in range(40)] for kind in (1, 2))
        place = to_id(dht_id_of("nodes/4"))
        near = sorted(holders[:10], key=lambda holder: node_id_of(holder.peer_id) ^ place)[:SAMPLE_WIDTH]
        for holder in holders[:10]:
            node = await world.node(holder)
            for number, signer in enumerate(signers):
                node._storage.store(record(signer), record(signer).to_bytes())
                if number < 5 and holder not in near:
                    node._storage.store(record(signer, "nodes/4"), record(signer, "nodes/4").to_bytes())
            assert await asker.ping(holder.peer_id)
            world.wire[holder.peer_id, "find"] = counted(world.wire[holder.peer_id, "find"])
        samples = set[frozenset[str]]()
        for _ in range(3):
            num_finds = 0
            found, _ = await asker.find([KEY], timeout_s=5, max_records=8)
            assert num_finds == SAMPLE_WIDTH
            assert 8 <= len(found) <= SAMPLE_WIDTH * 8
            samples.add(frozenset(each.peer_id for each in found))
        assert len(samples) > 1
        num_finds = 0
        found, _ = await asker.find(["nodes/4"], timeout_s=5, max_records=8)
        assert len(found) == 5
        assert num_finds == WIDTH

    virtual_time.run(main())


def test_calls_of_a_stranger_beyond_its_burst_wait_and_those_of_others_do_not() -> None:
    num_late, burst = 100, int(CALLS_PER_S * BURST_S)

    async def main() -> None:
        world = World()
        await world.node(HONEST)
        find, store = (world.wire[HONEST.peer_id, method] for method in ("find", "store"))
        now = asyncio.get_running_loop().time
        begin_s = now()
        for _ in range(burst // 2):
            await find(LIAR.peer_id, FindRequest().to_bytes())
            await store(LIAR.peer_id, b"")
        assert now() == begin_s
        late = asyncio.gather(*(find(LIAR.peer_id, FindRequest().to_bytes()) for _ in range(num_late)))
        await asyncio.sleep(0)
        await find(ASKER.peer_id, FindRequest().to_bytes())
        assert now() == begin_s
        await late
        assert now() - begin_s == pytest.approx(num_late / CALLS_PER_S)

    virtual_time.run(main())


def test_busy_peer_stays_in_the_table_and_is_asked_again() -> None:
    async def main() -> None:
        world = World()
        asker, _ = await world.node(ASKER), await world.node(HONEST)
        assert await asker.ping(HONEST.peer_id)
        answer = world.wire[HONEST.peer_id, "find"]

        async def busy(_peer_id: str, _request: bytes) -> bytes:
            raise too_many_calls(HONEST.peer_id)

        world.wire[HONEST.peer_id, "find"] = busy
        assert not await asker.ping(HONEST.peer_id)
        assert HONEST.peer_id in asker.known.table
        world.wire[HONEST.peer_id, "find"] = answer
        _, answered = await asker.find([KEY], timeout_s=5)
        assert answered
        assert asker.last_hops == 1

    virtual_time.run(main())
