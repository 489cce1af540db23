"""Introductions: which addresses a relay sends to whom, which side dials, and what is refused.

The hosts are in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.host_internet import FakeHost
from swarm.network.libp2p.host import Host
from swarm.network.paths import introductions
from swarm.network.paths.dial_policy import DialPolicy
from swarm.network.paths.introductions import INTRODUCE, INTRODUCED, Introductions
from swarm.network.paths.opener import ListenEndpoint
from swarm.network.paths.own_addresses import OwnAddresses
from swarm.network.relay.relay import Relay
from swarm.network.relay.reservations import Reservations
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.identity import Identity
from swarm_protocol.path_messages import Introduction, PathAnswer

LESSER, GREATER, RELAY, OTHER = sorted(Identity(bytes([i]) * 32).peer_id for i in range(1, 5))
NAT_1, NAT_2, PUBLIC = "/ip4/44.0.0.1/tcp/4001", "/ip4/44.0.0.2/tcp/4001", "/ip4/44.0.0.9/tcp/4001"
LAN_1, LAN_2 = "/ip4/192.168.1.2/tcp/4001", "/ip4/192.168.1.3/tcp/4001"
IP6, IP6_2 = "/ip6/2a00:1450::1/tcp/4001", "/ip6/2a00:1450::2/tcp/4001"
VICTIM = "/ip4/44.9.9.9/tcp/22"
ENDPOINTS = {4: ListenEndpoint(bind=("0.0.0.0", 4001), reach=("127.0.0.1", 4001))}


class Own:
    """What a node knows of its own addresses."""

    def __init__(self, host: FakeHost, *, is_public: bool) -> None:
        self.listen_endpoints = ENDPOINTS
        self.reachability = "public" if is_public else "relay"
        self._host = host

    @property
    def possible(self) -> Sequence[str]:
        return self._host.own


class World:
    """A relay with two nodes that have reservations with it, and the packets that their NATs let in."""

    def __init__(self, tasks: asyncio.TaskGroup, seen: Sequence[str] = (NAT_1, NAT_2)) -> None:
        self._tasks = tasks
        self._hosts: dict[str, FakeHost] = {}
        self.opened: list[tuple[str, tuple[str, int]]] = []
        self.relay = FakeHost(self._hosts, RELAY, [PUBLIC], [PUBLIC])
        self.lesser = FakeHost(self._hosts, LESSER, [seen[0]], [LAN_1])
        self.greater = FakeHost(self._hosts, GREATER, [seen[1]], [LAN_2])
        for host in (self.lesser, self.greater):
            host.meet(self.relay)
        self.of = {host.peer_id: self._introductions(host) for host in self._hosts.values()}

    def _introductions(self, host: FakeHost) -> Introductions:
        return Introductions(
            cast(Host, host),
            "net/",
            self._tasks,
            cast(OwnAddresses, Own(host, is_public=host is self.relay)),
            reservations=cast(Reservations, SimpleNamespace(held={RELAY})),
            relay=cast(Relay, SimpleNamespace(reserved={LESSER, GREATER} if host is self.relay else set())),
            policy=lambda: DialPolicy(own=host.own, given=()),
        )

    async def start(self) -> None:
        for each in self.of.values():
            await each.serve()

    async def ask(self, asker: FakeHost, **fields: Any) -> PathAnswer:
        request = Introduction(**{"peer_id": GREATER, **fields}).to_bytes()
        return PathAnswer.from_bytes(await asker.call(RELAY, f"net/{INTRODUCE}", request))


Case = Callable[[World], Coroutine[Any, Any, None]]


def run(case: Case, **options: Any) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks, **options)
            await world.start()
            await case(world)

    virtual_time.run(main())


def let_syns_meet(monkeypatch: pytest.MonkeyPatch, *, is_listener: bool = False) -> list[tuple[str, int]]:
    """Let an opener's SYN meet the dial of the other peer, or find a listener if `listener` is set.

    Return what is opened to.
    """
    opened: list[tuple[str, int]] = []

    async def open_path(_here: ListenEndpoint, there: tuple[str, int], met: Callable[[], None]) -> bool:
        opened.append(there)
        if is_listener:
            return False
        met()
        await asyncio.sleep(10)
        return True

    monkeypatch.setattr(introductions, "open_path", open_path)
    return opened


@pytest.mark.parametrize("asker", [LESSER, GREATER])
def test_the_smaller_peer_id_dials_and_the_greater_opens_whoever_asked(
    monkeypatch: pytest.MonkeyPatch, asker: str
) -> None:
    opened = let_syns_meet(monkeypatch)

    async def case(world: World) -> None:
        world.greater.own = (NAT_2,)  # once its NAT is open, the dial reaches it
        wanted = GREATER if asker == LESSER else LESSER
        assert await world.of[asker].connect(wanted, RELAY, ())
        assert [peer for peer, _ in world.lesser.dialled] == [GREATER]
        assert world.lesser.dialled[0][1][0] == NAT_2
        assert world.greater.dialled == []
        assert opened == [("44.0.0.1", 4001)]
        assert world.lesser.introduced == {GREATER: "punched"}
        assert world.greater.introduced == {LESSER: "punched"}

    run(case)


def test_opener_that_finds_a_listener_dials_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = let_syns_meet(monkeypatch, is_listener=True)

    async def case(world: World) -> None:
        world.lesser.own = (NAT_1,)  # it can be dialled
        world.greater.known[LESSER] = (NAT_1,)
        assert await world.of[LESSER].connect(GREATER, RELAY, ())
        assert opened == [("44.0.0.1", 4001)]
        assert world.greater.dialled == [(LESSER, (NAT_1,))]
        await asyncio.sleep(1)
        assert world.greater.introduced == {LESSER: "dialled back"}

    run(case)


def test_two_simultaneous_requests_make_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = let_syns_meet(monkeypatch)

    async def case(world: World) -> None:
        world.greater.own = (NAT_2,)
        results = await asyncio.gather(
            world.of[LESSER].connect(GREATER, RELAY, ()), world.of[GREATER].connect(LESSER, RELAY, ())
        )
        assert results == [True, True]
        assert len(world.lesser.dialled) == len(opened) == 1

    run(case)


def test_unsuccessful_pair_is_given_up_in_time_and_not_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_path(*_: object) -> bool:
        raise TimeoutError

    monkeypatch.setattr(introductions, "open_path", open_path)

    async def case(world: World) -> None:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        assert not await world.of[LESSER].connect(GREATER, RELAY, ())
        assert loop.time() - began_at <= introductions.ATTEMPT_S + 0.1
        assert len(world.lesser.dialled) == 1
        began_at = loop.time()
        assert not await world.of[LESSER].connect(GREATER, RELAY, ())
        assert loop.time() == began_at
        assert len(world.lesser.dialled) == 1
        await asyncio.sleep(introductions.RETRY_S)
        assert not await world.of[LESSER].connect(GREATER, RELAY, ())
        assert len(world.lesser.dialled) == 2

    run(case)


def test_relay_sends_only_addresses_that_it_sees_itself() -> None:
    async def case(world: World) -> None:
        told: list[Introduction] = []

        async def taken(_relay: str, data: bytes) -> bytes:
            told.append(Introduction.from_bytes(data))
            return PathAnswer(agreed=True, addrs=(VICTIM, LAN_2, "/ip4/44.0.0.2/tcp/9")).to_bytes()

        await world.greater.serve(f"net/{INTRODUCED}", taken)
        answer = await world.ask(world.lesser, addrs=(VICTIM, LAN_1, "/ip4/44.0.0.1/tcp/7"))
        assert told[0].addrs == (NAT_1, "/ip4/44.0.0.1/tcp/7")
        assert answer == PathAnswer(agreed=True, addrs=(NAT_2, "/ip4/44.0.0.2/tcp/9"))

    run(case)


@pytest.mark.parametrize(
    ("seen", "claims", "told"),
    [
        (NAT_1, (IP6, IP6_2, VICTIM), (NAT_1, IP6)),
        (NAT_1, (LAN_1, "/ip6/fd00::1/tcp/1", "/ip6/::1/tcp/1", "/ip6/fe80::1/tcp/1", IP6), (NAT_1, IP6)),
        (IP6, (IP6_2, NAT_1, VICTIM), (IP6, NAT_1)),
    ],
)
def test_relay_sends_one_claimed_ip_of_the_version_in_which_it_does_not_see_a_peer(
    seen: str, claims: tuple[str, ...], told: tuple[str, ...]
) -> None:
    async def case(world: World) -> None:
        heard: list[Introduction] = []

        async def taken(_relay: str, data: bytes) -> bytes:
            heard.append(Introduction.from_bytes(data))
            return PathAnswer(agreed=True).to_bytes()

        await world.greater.serve(f"net/{INTRODUCED}", taken)
        await world.ask(world.lesser, addrs=claims)
        assert heard[0].addrs == told

    run(case, seen=(seen, NAT_2))


def test_relay_sends_private_addresses_to_neighbours_behind_one_nat() -> None:
    async def case(world: World) -> None:
        answer = await world.ask(world.lesser, addrs=(LAN_1,))
        assert answer.addrs == ("/ip4/44.0.0.1/tcp/4002", LAN_2)

    run(case, seen=(NAT_1, "/ip4/44.0.0.1/tcp/4002"))


def test_neighbour_in_several_networks_is_reached_in_the_shared_one() -> None:
    """A NAT's router may not forward packets to its own public address."""
    vpn, seen = "/ip4/10.8.0.2/tcp/4001", "/ip4/44.0.0.1/tcp/4002"

    async def case(world: World) -> None:
        world.greater.own = (vpn, LAN_2)
        answer = await world.ask(world.lesser, addrs=(LAN_1,))
        assert answer.addrs == (seen, vpn, LAN_2)
        assert world.of[LESSER]._usable(answer.addrs) == (seen, LAN_2)

    run(case, seen=(NAT_1, seen))


@pytest.mark.parametrize(
    "why", ["no reservation", "itself", "asker behind a relay", "target behind a relay", "garbage"]
)
def test_relay_refuses(why: str) -> None:
    async def case(world: World) -> None:
        circuit = f"{PUBLIC}/p2p/{OTHER}/p2p-circuit"
        if why == "asker behind a relay":
            world.relay.peers[LESSER] = (circuit,)
        if why == "target behind a relay":
            world.relay.peers[GREATER] = (circuit,)
        wanted = {"no reservation": OTHER, "itself": LESSER}.get(why, GREATER)
        if why == "garbage":
            assert await world.lesser.call(RELAY, f"net/{INTRODUCE}", b"\xff") == PathAnswer().to_bytes()
        else:
            assert await world.ask(world.lesser, peer_id=wanted) == PathAnswer()
        await asyncio.sleep(1)
        assert world.greater.dialled == []

    run(case)


def test_peer_accepts_introductions_only_from_its_relays_and_not_too_often() -> None:
    async def case(world: World) -> None:
        request = Introduction(peer_id=OTHER, addrs=(VICTIM,)).to_bytes()
        FakeHost(world._hosts, OTHER, [VICTIM], [])  # it is there, but nothing gets through to it
        world.lesser.meet(world.greater)
        answer = await world.greater.call(LESSER, f"net/{INTRODUCED}", request)
        assert answer == PathAnswer().to_bytes()
        agreed = [
            PathAnswer.from_bytes(await world.relay.call(LESSER, f"net/{INTRODUCED}", request)).agreed
            for _ in range(introductions.MAX_BURST + 5)
        ]
        assert agreed.count(True) == introductions.MAX_BURST
        await asyncio.sleep(introductions.BURST_S + 0.1)
        answer = await world.relay.call(LESSER, f"net/{INTRODUCED}", request)
        assert PathAnswer.from_bytes(answer).agreed

    run(case)


def test_relay_cannot_have_packets_sent_to_more_than_one_public_ip_of_a_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = let_syns_meet(monkeypatch)

    async def case(world: World) -> None:
        addrs = (NAT_1, VICTIM, "/ip4/44.0.0.1/tcp/22", IP6, IP6_2)
        message = Introduction(peer_id=LESSER, addrs=addrs).to_bytes()
        assert PathAnswer.from_bytes(await world.relay.call(GREATER, f"net/{INTRODUCED}", message)).agreed
        await asyncio.sleep(1)
        assert {host for host, _ in opened} == {"44.0.0.1"}, "this node has no IPv6 listener"
        assert world.of[GREATER]._usable(addrs) == (NAT_1, "/ip4/44.0.0.1/tcp/22", IP6)
        assert world.of[GREATER]._usable((NAT_1, LAN_1, VICTIM)) == (NAT_1, LAN_1)

    run(case)


def test_simultaneous_attempts_are_bounded_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = let_syns_meet(monkeypatch)
    monkeypatch.setattr(introductions, "MAX_ATTEMPTS", 2)

    async def case(world: World) -> None:
        strangers = [FakeHost(world._hosts, f"{LESSER[:-1]}{i}", [VICTIM], []).peer_id for i in range(1, 5)]

        async def introduced(peer_id: str) -> bool:
            message = Introduction(peer_id=peer_id, addrs=(VICTIM,)).to_bytes()
            return PathAnswer.from_bytes(await world.relay.call(GREATER, f"net/{INTRODUCED}", message)).agreed

        assert [await introduced(each) for each in strangers] == [True, True, False, False]
        assert await introduced(strangers[0]), "an attempt in flight is joined"
        assert not await world.of[GREATER].connect(LESSER, RELAY, ())
        await asyncio.sleep(introductions.ATTEMPT_S + 0.1)
        assert len(opened) == 2
        assert await introduced(strangers[2])

    run(case)


def test_attempts_for_a_node_that_asks_for_many_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = let_syns_meet(monkeypatch)
    monkeypatch.setattr(introductions, "MAX_ATTEMPTS", 2)

    async def introduce(_asker: str, _data: bytes) -> bytes:
        await asyncio.sleep(0.5)
        return PathAnswer(agreed=True, addrs=(VICTIM,)).to_bytes()

    async def case(world: World) -> None:
        strangers = [FakeHost(world._hosts, f"{LESSER[:-1]}{i}", [VICTIM], []).peer_id for i in range(1, 5)]
        await world.relay.serve(f"net/{INTRODUCE}", introduce)
        await asyncio.gather(*(world.of[GREATER].connect(each, RELAY, ()) for each in strangers))
        assert len(opened) == 2

    run(case)


def test_failures_are_dropped_once_they_have_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introductions, "ATTEMPT_S", 0.1)

    async def case(world: World) -> None:
        at = world.of[LESSER]
        for peer_id in (GREATER, OTHER):
            FakeHost(world._hosts, peer_id, [VICTIM], [])
            attempt = at._begin(peer_id, (VICTIM,))
            assert attempt is not None
            await attempt
            assert list(at._failed) == [peer_id]
            await asyncio.sleep(introductions.RETRY_S)

    run(case)


def test_private_addresses_of_another_network_are_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = let_syns_meet(monkeypatch)

    async def case(world: World) -> None:
        addrs = ("/ip4/10.0.0.1/tcp/22", "/ip4/127.0.0.1/tcp/22", "/ip4/169.254.169.254/tcp/80")
        message = Introduction(peer_id=LESSER, addrs=addrs).to_bytes()
        assert PathAnswer.from_bytes(await world.relay.call(GREATER, f"net/{INTRODUCED}", message)).agreed
        await asyncio.sleep(1)
        assert opened == []
        assert world.greater.dialled == []

    run(case)


def test_node_without_a_listener_asks_for_no_introduction() -> None:
    async def case(world: World) -> None:
        world.of[LESSER]._own.listen_endpoints = {}
        assert not await world.of[LESSER].connect(GREATER, RELAY, ())
        assert world.greater.dialled == []

    run(case)


def test_failing_address_does_not_close_the_connection_over_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def open_path(_here: ListenEndpoint, there: tuple[str, int], met: Callable[[], None]) -> bool:
        if there[1] == 4002:
            await asyncio.sleep(introductions.POLL_S / 2)
            raise ConnectionResetError
        met()
        await ended.wait()
        return True

    monkeypatch.setattr(introductions, "open_path", open_path)

    async def case(world: World) -> None:
        at = world.of[GREATER]
        opening = [asyncio.create_task(at._open(LESSER, addr)) for addr in (NAT_1, NAT_1.replace("4001", "4002"))]
        await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
        assert at.carried == {LESSER}
        ended.set()
        await asyncio.wait(opening)
        assert not at.carried

    run(case)


def test_attempt_ends_without_an_error_when_the_daemon_ends_during_it(monkeypatch: pytest.MonkeyPatch) -> None:
    let_syns_meet(monkeypatch)

    async def case(world: World) -> None:
        async def fail() -> dict[str, tuple[str, ...]]:
            raise PeerUnreachable("this node's libp2p daemon has ended")

        monkeypatch.setattr(world.lesser, "connected_peers", fail)
        attempt = world.of[LESSER]._begin(GREATER, (NAT_2,))
        assert attempt is not None
        await attempt

    run(case)
