"""Evidence about servers passes between nodes: it is checked, bounded and kept, and a mere claim convicts nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from support.kept_evidence import KeptEvidence
from support.wrong_possession import MODEL, against, against_nobody, manifest, record, statement
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet
from swarm.serving.evidence import server_convictions as module
from swarm.serving.evidence.server_bans import MAX_UNLISTED, RENEWAL_S
from swarm.serving.evidence.server_convictions import GIVE_TIMEOUT_S, MAX_TAKEN, SHOWN_AGAIN_S, ServerConvictions
from swarm.testing import virtual_time
from swarm.trust.reputation import BAR_S
from swarm_protocol import limits
from swarm_protocol.errors import IntegrityError, PeerRefused, PeerTimeout, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import WRONG_ANSWER, Evidence
from swarm_protocol.records import ServeRecord
from swarm_protocol.served_evidence_messages import SERVER_BANS_METHOD, SERVER_EVIDENCE_METHOD, WrongPossession

LIAR = Identity(bytes([50]) * 32)
SERVERS = [Identity(bytes([number]) * 32) for number in range(60, 72)]
NETWORK = "test"


class Nodes:
    """Nodes that announce themselves as servers of MODEL, and what each knows of convicted servers."""

    def __init__(self, internet: MemoryInternet, stack: AsyncExitStack) -> None:
        self._internet = internet
        self._stack = stack

    async def add(
        self, identity: Identity, *, serves: bool = True, store: KeptEvidence | None = None, lies: bool = False
    ) -> ServerConvictions:
        network = self._internet.network(identity=identity)
        membership = await self._stack.enter_async_context(Membership(network))
        held = ServerConvictions(network, membership, store=store)
        self._stack.push_async_callback(held.close)
        if serves or lies:
            membership.announce(record())
        if serves:
            await held.serve(MODEL)
        return held


@asynccontextmanager
async def nodes() -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        yield Nodes(MemoryInternet(), stack)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.1)


def now(held: ServerConvictions) -> float:
    return held._network.now()


def test_evidence_reaches_all_servers_in_a_bounded_number_of_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SPREAD", 3)
    given: list[str] = []
    give = ServerConvictions._give

    async def counted(self: ServerConvictions, peer_id: str, model: str, data: bytes) -> None:
        given.append(peer_id)
        await give(self, peer_id, model, data)

    monkeypatch.setattr(ServerConvictions, "_give", counted)

    async def scenario() -> None:
        async with nodes() as swarm:
            await swarm.add(LIAR, serves=False, lies=True)
            all_held = [await swarm.add(each) for each in SERVERS]
            await asyncio.sleep(5)
            all_held[0].found(against(LIAR, NETWORK, now(all_held[0])))
            await until(lambda: sum(held.peers == {LIAR.peer_id} for held in all_held) > len(SERVERS) / 2)
            for held in all_held:  # a node that the gossip missed asks, as each server does every few minutes
                await held.learn(MODEL, {each.peer_id: record() for each in SERVERS})
            await until(lambda: all(held.peers == {LIAR.peer_id} for held in all_held))
            assert len(given) <= 3 * len(SERVERS)
            assert LIAR.peer_id not in given

    virtual_time.run(scenario())


def test_client_learns_evidence_from_servers_and_passes_on_its_own() -> None:
    async def scenario() -> None:
        async with nodes() as swarm:
            await swarm.add(LIAR, serves=False, lies=True)
            first, second = [await swarm.add(each) for each in SERVERS[:2]]
            client = await swarm.add(SERVERS[2], serves=False)
            await asyncio.sleep(5)
            await first.take(against(LIAR, NETWORK, now(first)), first._network.peer_id)
            heard: list[str] = []
            end_watch = client.watch(lambda ban: heard.append(ban.verdict.peer_id))
            await client.learn(MODEL, {SERVERS[0].peer_id: record()}, within_s=1.0)
            assert (client.peers, heard) == ({LIAR.peer_id}, [LIAR.peer_id])
            end_watch()
            other = Identity(bytes([51]) * 32)
            client.found(against(other, NETWORK, now(client)))
            await until(lambda: other.peer_id in first.peers & second.peers)
            assert heard == [LIAR.peer_id], "its watch has ended"

    virtual_time.run(scenario())


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda at: against_nobody(LIAR, NETWORK, at), "the statement is correct"),
        (lambda at: against(LIAR, "another", at), "for network"),
        (lambda at: against(LIAR, NETWORK, at)[:-1], "."),
        (lambda at: Evidence(kind=WRONG_ANSWER, body=b"x").to_bytes(), "not about a server's files"),
        (
            lambda at: (
                WrongPossession(manifest=manifest().signed, statement=statement(LIAR, NETWORK, at)[:-64] + bytes(64))
                .evidence()
                .to_bytes()
            ),
            "signature",
        ),
        (
            lambda at: (
                WrongPossession(manifest=manifest(SERVERS[5]).signed, statement=statement(LIAR, NETWORK, at))
                .evidence()
                .to_bytes()
            ),
            "another manifest",
        ),
        (lambda at: bytes(WrongPossession.MAX_BYTES + 1), "more than"),
    ],
)
def test_invalid_evidence_convicts_nobody_and_its_sender_is_ignored_later(
    made: Callable[[float], bytes], why: str
) -> None:
    async def scenario() -> None:
        async with nodes() as swarm:
            held = await swarm.add(SERVERS[0])
            sender = await swarm.add(SERVERS[1])
            with pytest.raises((PeerViolation, IntegrityError), match=why):
                await held.take(made(now(held)), SERVERS[1].peer_id)
            assert (held.peers, held.num_refused) == (frozenset(), 1)
            with pytest.raises(PeerViolation, match="earlier evidence proved nothing"):
                await sender._network.call(
                    SERVERS[0].peer_id,
                    f"{SERVER_EVIDENCE_METHOD}/{MODEL}",
                    against(LIAR, NETWORK, now(held)),
                    timeout_s=5.0,
                )
            assert not held.peers

    virtual_time.run(scenario())


def test_evidence_is_kept_over_a_restart_and_forgotten_when_the_ban_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store = KeptEvidence()
        async with nodes() as swarm:
            first = await swarm.add(SERVERS[0], store=store)
            assert await first.take(against(LIAR, NETWORK, now(first)), SERVERS[1].peer_id)
            assert not await first.take(against(LIAR, NETWORK, now(first) + 1), SERVERS[1].peer_id), (
                "known evidence must not count as new"
            )
            again = await swarm.add(SERVERS[2], store=store)
            store["broken"] = b"no evidence"
            await again.recall()
            assert again.peers == {LIAR.peer_id}
            later = now(again) + BAR_S
            monkeypatch.setattr(again._network, "now", lambda: later)
            assert (again.peers, again.bans) == (frozenset(), ())
            other = Identity(bytes([51]) * 32)
            await again.take(against(other, NETWORK, now(again)), SERVERS[1].peer_id)
            assert set(store) == {other.peer_id, "broken"}

    virtual_time.run(scenario())


def test_evidence_of_a_later_lie_bans_again_once_the_ban_for_the_earlier_one_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two halves of a network can hold evidence of two lies, an hour apart."""

    async def scenario() -> None:
        async with nodes() as swarm:
            held = await swarm.add(SERVERS[0])
            first = now(held)
            assert await held.take(against(LIAR, NETWORK, first), SERVERS[1].peer_id)
            monkeypatch.setattr(held._network, "now", lambda: first + BAR_S + 60)
            assert not held.peers
            assert await held.take(against(LIAR, NETWORK, first + 3600), SERVERS[1].peer_id)
            assert held.peers == {LIAR.peer_id}

    virtual_time.run(scenario())


def test_evidence_from_long_ago_or_from_the_future_changes_nothing_and_blames_nobody() -> None:
    async def scenario() -> None:
        async with nodes() as swarm:
            held, sender = await swarm.add(SERVERS[0]), SERVERS[1].peer_id
            for at in (now(held) - BAR_S - 1, now(held) + RENEWAL_S):
                assert not await held.take(against(LIAR, NETWORK, at), sender)
            assert (held.peers, held.num_refused) == (frozenset(), 0)
            assert await held.take(against(LIAR, NETWORK, now(held) - BAR_S + 60), sender)

    virtual_time.run(scenario())


def test_evidence_is_neither_reported_nor_passed_on_when_there_is_no_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such evidence would otherwise return to every node as news, again and again."""
    monkeypatch.setattr(limits, "MAX_SERVER_BANS", 1)

    async def scenario() -> None:
        async with nodes() as swarm:
            await swarm.add(LIAR, serves=False, lies=True)
            store = KeptEvidence()
            held, other = await swarm.add(SERVERS[0], store=store), await swarm.add(SERVERS[1])
            await asyncio.sleep(5)
            assert await held.take(against(LIAR, NETWORK, now(held)), SERVERS[2].peer_id)
            await until(lambda: other.peers == {LIAR.peer_id})
            heard: list[str] = []
            held.watch(lambda ban: heard.append(ban.verdict.peer_id))
            stranger = strangers(1)[0]
            assert not await held.take(against(stranger, NETWORK, now(held)), SERVERS[2].peer_id)
            await asyncio.sleep(5)
            assert (heard, held.peers, set(store)) == ([], {LIAR.peer_id}, {LIAR.peer_id})
            assert other._taken[SERVERS[0].peer_id][1] == 1, "it must count as evidence that this peer gave"

    virtual_time.run(scenario())


def test_evidence_file_is_deleted_at_start_when_its_ban_has_ended() -> None:
    async def scenario() -> None:
        async with nodes() as swarm:
            store = KeptEvidence()
            held = await swarm.add(SERVERS[0], store=store)
            store[LIAR.peer_id] = against(LIAR, NETWORK, now(held) - BAR_S - 1)
            await held.recall()
            assert (held.peers, dict(store)) == (frozenset(), {})

    virtual_time.run(scenario())


def strangers(num: int) -> Sequence[Identity]:
    return [Identity(number.to_bytes(32, "big")) for number in range(1000, 1000 + num)]


def test_strangers_that_convict_themselves_leave_room_for_evidence_about_servers() -> None:
    """Evidence from one peer is checked up to its share; beyond the strangers' share, none of theirs is kept."""

    async def scenario() -> None:
        async with nodes() as swarm:
            await swarm.add(LIAR, serves=False, lies=True)
            held = await swarm.add(SERVERS[0])
            await asyncio.sleep(5)
            made = strangers(MAX_UNLISTED + 4)
            for each in made[:MAX_TAKEN]:
                assert await held.take(against(each, NETWORK, now(held)), SERVERS[1].peer_id)
            with pytest.raises(PeerRefused, match="too much evidence"):
                await held.take(against(made[-1], NETWORK, now(held)), SERVERS[1].peer_id)
            for each in made[MAX_TAKEN:]:
                await held.take(against(each, NETWORK, now(held)), SERVERS[2].peer_id)
            assert len(held.peers) == MAX_UNLISTED
            assert await held.take(against(LIAR, NETWORK, now(held)), SERVERS[2].peer_id)
            assert LIAR.peer_id in held.peers

    virtual_time.run(scenario())


def test_peer_that_asks_again_at_once_is_refused() -> None:
    async def scenario() -> None:
        async with nodes() as swarm:
            held = await swarm.add(SERVERS[0])
            await held.take(against(LIAR, NETWORK, now(held)), SERVERS[0].peer_id)
            client = await swarm.add(SERVERS[1], serves=False)
            await client._ask(SERVERS[0].peer_id, MODEL)
            assert client.peers == {LIAR.peer_id}
            other = Identity(bytes([51]) * 32)
            await held.take(against(other, NETWORK, now(held)), SERVERS[0].peer_id)
            await client._ask(SERVERS[0].peer_id, MODEL)
            assert client.peers == {LIAR.peer_id}
            await asyncio.sleep(SHOWN_AGAIN_S)
            await client._ask(SERVERS[0].peer_id, MODEL)
            assert client.peers == {LIAR.peer_id, other.peer_id}

    virtual_time.run(scenario())


def test_stream_is_closed_when_its_peer_asks_for_nothing() -> None:
    """Streams are bounded in number, and idle ones would keep others out."""

    async def scenario() -> None:
        async with nodes() as swarm:
            await swarm.add(SERVERS[0])
            client = await swarm.add(SERVERS[1], serves=False)
            method = f"{SERVER_BANS_METHOD}/{MODEL}"
            async with client._network.stream(SERVERS[0].peer_id, method, timeout_s=3600.0) as stream:
                async with asyncio.timeout(GIVE_TIMEOUT_S + 1.0):
                    with pytest.raises(PeerTimeout):
                        await stream.receive()

    virtual_time.run(scenario())


def test_servers_are_looked_up_once_a_minute_when_fresh_keys_convict_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups: list[float] = []
    servers = Membership.servers

    async def counted(self: Membership, model: str, **options: float) -> dict[str, ServeRecord]:
        lookups.append(asyncio.get_running_loop().time())
        return await servers(self, model, **options)

    monkeypatch.setattr(Membership, "servers", counted)

    async def scenario() -> None:
        async with nodes() as swarm:
            held, sender = [await swarm.add(each) for each in SERVERS[:2]]
            await asyncio.sleep(5)
            for number in range(12):
                key = Identity(bytes([100 + number]) * 32)
                await held.take(against(key, NETWORK, now(held)), sender._network.peer_id)
                await asyncio.sleep(15)
            assert len(held.peers) == 12
            assert 0 < len(lookups) <= 2 * 3, "two clients in three minutes"

    virtual_time.run(scenario())


def test_servers_are_looked_up_again_soon_when_none_were_found() -> None:
    async def scenario() -> None:
        async with nodes() as swarm:
            held = await swarm.add(SERVERS[0], serves=False)
            held._models[MODEL] = None
            assert not await held._servers_of(MODEL)
            await swarm.add(SERVERS[1])
            await asyncio.sleep(module.NONE_LISTED_S + 1)
            assert await held._servers_of(MODEL) == {SERVERS[1].peer_id}

    virtual_time.run(scenario())


def test_servers_stay_known_and_are_looked_up_again_soon_when_a_lookup_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers, fails = Membership.servers, False

    async def at_times(self: Membership, model: str, **options: float) -> dict[str, ServeRecord]:
        if fails:
            raise PeerTimeout("nobody answers")
        return await servers(self, model, **options)

    monkeypatch.setattr(Membership, "servers", at_times)

    async def scenario() -> None:
        nonlocal fails
        async with nodes() as swarm:
            held = await swarm.add(SERVERS[0], serves=False)
            await swarm.add(SERVERS[1])
            await asyncio.sleep(5)
            held._models[MODEL] = None
            assert await held._servers_of(MODEL) == {SERVERS[1].peer_id}
            await asyncio.sleep(module.LISTED_S + 1)
            fails = True
            assert await held._servers_of(MODEL) == {SERVERS[1].peer_id}
            fails = False
            await swarm.add(SERVERS[2])
            await asyncio.sleep(module.NONE_LISTED_S + 1)
            assert await held._servers_of(MODEL) == {SERVERS[1].peer_id, SERVERS[2].peer_id}

    virtual_time.run(scenario())
