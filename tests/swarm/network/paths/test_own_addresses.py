"""A node's own addresses: what peers see and reach, and how it answers peers that ask the same.

The hosts are in memory.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest
from support.host_internet import FakeHost
from swarm.network.libp2p.daemon_errors import translate
from swarm.network.libp2p.host import Host
from swarm.network.paths import address_survey, own_addresses, peer_addresses
from swarm.network.paths.address_survey import RETRY_S, AddressSurvey
from swarm.network.paths.opener import ListenEndpoint
from swarm.network.paths.own_addresses import OwnAddresses
from swarm.network.paths.peer_addresses import (
    ASK_S,
    DIAL_BACK,
    DIAL_S,
    MAX_PER_NETWORK,
    MAX_PER_PEER,
    MAX_PER_PERIOD,
    MAX_WAITING,
    OBSERVE,
    PERIOD_S,
    TURN_S,
    PeerAddresses,
)
from swarm.network.suspension import SuspensionWatch
from swarm.testing import virtual_time
from swarm_protocol.errors import StartError
from swarm_protocol.identity import Identity
from swarm_protocol.path_messages import PathAddrs, PathAnswer

NODE, *PEERS = (Identity(bytes([i]) * 32).peer_id for i in range(1, 7))
NAT, LAN, HERE = "/ip4/44.0.0.1/tcp/4001", "/ip4/192.168.1.2/tcp/4001", "/ip4/127.0.0.1/tcp/4001"
MAPPED = "/ip4/44.0.0.1/tcp/55555"
IP6 = "/ip6/2a00:1450::2/tcp/4001"
NAMES = ("/dns4/seed.example/tcp/4001", "/dns4/seed.example/tcp/5001")
VICTIM = "/ip4/44.9.9.9/tcp/4001"
CIRCUIT = f"/ip4/44.1.1.1/tcp/4001/p2p/{PEERS[0]}/p2p-circuit"
ENDPOINTS = {4: ListenEndpoint(bind=("0.0.0.0", 4001), reach=("127.0.0.1", 4001))}


class World:
    """A node and the peers that it asks."""

    def __init__(self, *, seen_at: str, own: Sequence[str], num_peers: int, **options: Any) -> None:
        self.hosts: dict[str, FakeHost] = {}
        self.node = FakeHost(self.hosts, NODE, [seen_at], own)
        self.peers = [FakeHost(self.hosts, PEERS[i], [f"/ip4/44.0.1.{i}/tcp/4001"], ()) for i in range(num_peers)]
        for peer in self.peers:
            self.node.meet(peer)
        self.carried: set[str] = set()
        self.own, self.survey = self.addresses(self.node, asked=[peer.peer_id for peer in self.peers], **options)
        self.seen_at: tuple[str, ...] = ()
        """The addresses at which others see the peers."""

    def addresses(
        self,
        host: FakeHost,
        *,
        asked: Sequence[str] = (),
        announced: Sequence[str] = (),
        relayed: Sequence[str] = (),
        listens: bool = True,
    ) -> tuple[OwnAddresses, AddressSurvey]:
        own = OwnAddresses(
            cast(Host, host),
            announced=announced,
            listen_endpoints=ENDPOINTS if listens else {},
            relayed=lambda: relayed,
        )
        survey = AddressSurvey(
            cast(Host, host), "net/", own, asked=lambda: asked, carried=self.carried, on_change=lambda: None
        )
        return own, survey

    async def measure(self) -> None:
        await self.survey.observe()
        running = asyncio.create_task(self.survey.run())
        await self.survey.measured.wait()
        running.cancel()
        await asyncio.wait((running,))


def run(
    case: Callable[[World], Coroutine[Any, Any, None]],
    *,
    seen_at: str = NAT,
    own: Sequence[str] = (HERE, LAN),
    num_peers: int = 3,
    **options: Any,
) -> None:
    async def main() -> None:
        world = World(seen_at=seen_at, own=own, num_peers=num_peers, **options)
        for each in world.peers:
            host = cast(Host, each)
            await PeerAddresses(host, "net/", carried=world.carried, seen_at=lambda: world.seen_at).serve()
        await case(world)

    virtual_time.run(main())


def let_in(monkeypatch: pytest.MonkeyPatch, *reachable: str) -> list[tuple[str, list[str]]]:
    """Let only these addresses answer a dial back. Return the dialled ones."""
    dialled: list[tuple[str, list[str]]] = []

    async def dial_each(peer_id: str, addrs: Sequence[str]) -> list[str]:
        dialled.append((peer_id, list(addrs)))
        return [addr for addr in addrs if addr in reachable]

    monkeypatch.setattr(peer_addresses, "_dial_each", dial_each)
    return dialled


def test_public_host_announces_addresses_that_two_peers_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = let_in(monkeypatch, NAT)

    async def case(world: World) -> None:
        await world.measure()
        assert world.own.reachability == "public"
        assert world.own.is_open
        assert world.own.to_announce() == (NAT, CIRCUIT)
        assert dialled == [(NODE, [NAT])] * 2

    run(case, own=(HERE, NAT), relayed=(CIRCUIT,))


def test_forwarded_port_is_announced_and_does_not_count_as_open(monkeypatch: pytest.MonkeyPatch) -> None:
    let_in(monkeypatch, NAT)

    async def case(world: World) -> None:
        await world.measure()
        assert world.own.reachability == "public"
        assert not world.own.is_open, "it may be behind a NAT that lets in packets from every peer it has contacted"
        assert world.own.to_announce() == (NAT, LAN)

    run(case, seen_at=MAPPED)


def test_node_behind_a_nat_announces_relays_and_its_lan(monkeypatch: pytest.MonkeyPatch) -> None:
    let_in(monkeypatch)

    async def case(world: World) -> None:
        await world.measure()
        assert world.own.reachability == "relay"
        assert world.own.to_announce() == (CIRCUIT, LAN)

    run(case, relayed=(CIRCUIT,))


def test_address_that_only_one_of_two_peers_reaches_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [[NAT], [], []]

    async def dial_each(_peer_id: str, _addrs: Sequence[str]) -> list[str]:
        return answers.pop()

    monkeypatch.setattr(peer_addresses, "_dial_each", dial_each)

    async def case(world: World) -> None:
        await world.measure()
        assert NAT not in world.own.to_announce()

    run(case)


def test_one_liar_of_three_does_not_change_a_node_s_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    let_in(monkeypatch, NAT, VICTIM)

    async def case(world: World) -> None:
        liar = world.peers[0]
        liar.peers[NODE] = (VICTIM,)

        async def lie(_peer_id: str, data: bytes) -> bytes:
            return PathAnswer(agreed=True, addrs=(*PathAddrs.from_bytes(data).addrs[:1], VICTIM)).to_bytes()

        await liar.serve(f"net/{DIAL_BACK}", lie)
        await world.measure()
        assert world.own.to_announce() == (NAT, LAN)

    run(case)


@pytest.mark.parametrize("lie", ["nothing was reached", "another port", "another IP"])
def test_liar_that_is_asked_first_does_not_hide_a_node_or_give_it_a_symmetric_nat(
    monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    let_in(monkeypatch, NAT)

    async def case(world: World) -> None:
        liar = world.peers[0]
        if lie == "nothing was reached":

            async def deny(_peer_id: str, _data: bytes) -> bytes:
                return PathAnswer(agreed=True).to_bytes()

            await liar.serve(f"net/{DIAL_BACK}", deny)
        elif lie == "another port":
            liar.peers[NODE] = (MAPPED,)
        else:
            liar.peers[NODE] = (VICTIM, VICTIM.replace("4001", "4002"))
        await world.measure()
        assert world.own.reachability == "public"
        assert NAT in world.own.to_announce()
        assert not world.own.is_behind_symmetric_nat

    run(case)


def two_versions(world: World, monkeypatch: pytest.MonkeyPatch, *, by_ip4: int) -> None:
    """Let the node listen on both versions. The first `by_ip4` of its peers connect by IPv4, and the others by IPv6."""
    monkeypatch.setattr(own_addresses, "source_addresses", lambda: ("192.168.1.2", "2a00:1450::2"))
    ip6 = ListenEndpoint(bind=("::", 4001), reach=("::1", 4001))
    world.own.listen_endpoints = {**ENDPOINTS, 6: ip6}
    for number, peer in enumerate(world.peers):
        world.node.peers[peer.peer_id] = (f"/ip{4 if number < by_ip4 else 6}/{_ip_of_peer(number, by_ip4)}/tcp/4001",)
        peer.peers[NODE] = (NAT,) if number < by_ip4 else (IP6,)


def _ip_of_peer(number: int, by_ip4: int) -> str:
    return f"44.{number}.0.1" if number < by_ip4 else f"2a00:{number + 1:x}::1"


@pytest.mark.parametrize("by_ip4", [2, 4, 0])
def test_peers_of_each_ip_version_decide_what_is_announced_of_that_version(
    monkeypatch: pytest.MonkeyPatch, by_ip4: int
) -> None:
    let_in(monkeypatch, NAT, IP6)

    async def case(world: World) -> None:
        two_versions(world, monkeypatch, by_ip4=by_ip4)
        await world.measure()
        confirmed = {2: (NAT, IP6), 4: (NAT,), 0: (IP6,)}[by_ip4]
        assert world.own.to_announce() == (*confirmed, LAN)
        assert world.own.is_open is (by_ip4 > 0), "peers without IPv6 need relays to a node that IPv4 does not reach"

    run(case, own=(HERE, NAT, LAN, IP6), num_peers=4)


@pytest.mark.parametrize("is_private_network", [True, False])
def test_address_that_only_a_neighbour_reaches_counts_only_in_a_private_network(
    monkeypatch: pytest.MonkeyPatch, is_private_network: bool
) -> None:
    """Behind a NAT a neighbour can be the only peer that is connected by IPv4, after the NAT has lost its mappings."""
    let_in(monkeypatch, LAN)

    async def case(world: World) -> None:
        neighbour, other = world.peers
        world.node.peers = {neighbour.peer_id: ("/ip4/192.168.1.3/tcp/4001",)}
        neighbour.peers[NODE] = (LAN,)
        await world.measure()
        assert (world.own.is_open, world.own.reachability) == (True, "public")
        if not is_private_network:
            world.node.peers[other.peer_id] = (CIRCUIT,)
            assert (world.own.is_open, world.own.reachability) == (False, "relay")

    run(case, own=(HERE, LAN), num_peers=2, relayed=(CIRCUIT,))


@pytest.mark.parametrize("listens_by_ip4", [True, False])
def test_public_host_needs_relays_only_if_it_listens_by_ip6_alone(
    monkeypatch: pytest.MonkeyPatch, listens_by_ip4: bool
) -> None:
    """Peers with IPv4 alone cannot dial it, and it cannot dial those of them that need no relay themselves."""
    let_in(monkeypatch, NAT, IP6)

    async def case(world: World) -> None:
        two_versions(world, monkeypatch, by_ip4=4 if listens_by_ip4 else 0)
        if not listens_by_ip4:
            world.own.listen_endpoints, world.own._first_version = {6: world.own.listen_endpoints[6]}, 6
        await world.measure()
        assert world.own.is_open, "it can relay for others"
        assert world.own.needs_relays is not listens_by_ip4

    run(case, own=(HERE, NAT, LAN, IP6), num_peers=4)


def test_unconfirmed_ip6_address_is_sent_only_to_peers_that_the_firewall_lets_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_in(monkeypatch)
    stable, private = "/ip6/2a00:1450::99/tcp/4001", "/ip6/fd00::2/tcp/4001"

    async def case(world: World) -> None:
        two_versions(world, monkeypatch, by_ip4=4)
        await world.own.refresh()
        assert world.own.to_announce() == (LAN, private), "a firewall drops unsolicited packets"
        await world.measure()
        assert world.own.to_announce() == (LAN, private)
        assert world.own.possible == (LAN, private, NAT, IP6), "of several, the one from which connections come"

    run(case, own=(HERE, LAN, stable, IP6, private), num_peers=4)


def test_nat_of_ip4_is_remembered_while_all_peers_are_connected_by_ip6(monkeypatch: pytest.MonkeyPatch) -> None:
    let_in(monkeypatch)

    async def case(world: World) -> None:
        two_versions(world, monkeypatch, by_ip4=4)
        await world.measure()
        two_versions(world, monkeypatch, by_ip4=0)
        await world.measure()
        assert {NAT, IP6} <= {*world.own.possible}
        two_versions(world, monkeypatch, by_ip4=4)
        world.node.own = (HERE, LAN)  # the provider no longer gives an IPv6 address
        await world.measure()
        assert IP6 not in world.own.possible

    run(case, own=(HERE, LAN, IP6), num_peers=4)


def test_different_observed_ip6_addresses_do_not_repeat_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_in(monkeypatch)

    async def case(world: World) -> None:
        two_versions(world, monkeypatch, by_ip4=0)
        for number, peer in enumerate(world.peers):
            peer.peers[NODE] = (f"/ip6/2a00:1450::{number + 10}/tcp/4001",)
        await world.measure()
        assert not await world.survey._is_seen_elsewhere()
        for peer in world.peers:
            peer.peers[NODE] = (IP6,)
        assert await world.survey._is_seen_elsewhere()

    run(case, own=(HERE, LAN, IP6), num_peers=4)


def test_node_behind_a_symmetric_nat_can_be_opened_by_ip6(monkeypatch: pytest.MonkeyPatch) -> None:
    let_in(monkeypatch)

    async def case(world: World) -> None:
        two_versions(world, monkeypatch, by_ip4=4)
        for number, peer in enumerate(world.peers):
            peer.peers[NODE] = (f"/ip4/44.0.0.1/tcp/{51000 + number}",)
        await world.measure()
        assert world.own.is_behind_symmetric_nat
        assert world.own.can_be_opened
        world.node.own = (HERE, LAN)
        await world.own.refresh()
        assert not world.own.can_be_opened

    run(case, own=(HERE, LAN, IP6), num_peers=4)


def test_nat_is_symmetric_when_the_observed_ports_differ_by_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    let_in(monkeypatch)

    async def case(world: World) -> None:
        assert not world.own.is_behind_symmetric_nat
        for number, peer in enumerate(world.peers):
            peer.peers[NODE] = (f"/ip4/44.0.0.1/tcp/{51000 + number}",)
        await world.measure()
        assert world.own.is_behind_symmetric_nat

    run(case)


@pytest.mark.parametrize(("port", "is_open"), [(4001, True), (5001, True), (4002, False)])
def test_node_that_announces_a_name_also_announces_confirmed_addresses(
    monkeypatch: pytest.MonkeyPatch, port: int, is_open: bool
) -> None:
    place = f"/ip4/44.0.0.1/tcp/{port}"
    let_in(monkeypatch, place)

    async def case(world: World) -> None:
        await world.measure()
        assert world.own.reachability == "public"
        assert world.own.to_announce() == (*NAMES, place)
        assert world.own.is_open is is_open

    run(case, seen_at=place if port == 4002 else MAPPED, own=NAMES, announced=NAMES)


def test_network_on_one_machine_announces_loopback_and_requests_no_dial_back(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = let_in(monkeypatch, HERE)

    async def case(world: World) -> None:
        await world.measure()
        assert world.own.to_announce() == (HERE,)
        assert dialled == []

    run(case, seen_at=HERE, own=(HERE,))


def test_first_node_announces_its_interfaces_since_nobody_can_confirm_them() -> None:
    async def case(world: World) -> None:
        await world.measure()
        assert world.own.reachability == "unknown"
        assert world.own.to_announce() == (NAT, LAN)

    run(case, own=(HERE, NAT, LAN), num_peers=0)


def test_addresses_that_the_operator_announces_replace_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = let_in(monkeypatch)

    async def case(world: World) -> None:
        await world.measure()
        assert world.own.to_announce() == (NAT,), "the operator names it"
        assert world.own.reachability == "unknown"
        assert dialled == [(NODE, [NAT])] * 2

    run(case, own=(NAT,), announced=(NAT,))


def test_addresses_are_measured_again_when_one_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = "/ip4/44.0.0.77/tcp/4001"
    let_in(monkeypatch, NAT, moved)

    async def case(world: World) -> None:
        await world.survey.observe()
        running = asyncio.create_task(world.survey.run())
        await asyncio.sleep(1)
        assert world.own.to_announce() == (NAT,)
        world.node.own = (HERE, moved)
        for peer in world.peers:
            peer.peers[NODE] = (moved,)
        await asyncio.sleep(address_survey.LOOK_S + 1)
        assert world.own.to_announce() == (moved,)
        running.cancel()
        await asyncio.wait((running,))

    run(case, own=(HERE, NAT))


def test_lack_of_open_files_is_reported_once_and_addresses_are_measured_afterwards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moved = "/ip4/44.0.0.77/tcp/4001"
    let_in(monkeypatch, NAT, moved)
    caplog.set_level(logging.WARNING)

    async def case(world: World) -> None:
        async def addrs() -> tuple[str, ...]:
            raise translate(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), NODE)

        await world.survey.observe()
        running = asyncio.create_task(world.survey.run())
        await asyncio.sleep(1)
        with monkeypatch.context() as lacking:
            lacking.setattr(world.node, "addrs", addrs)
            await asyncio.sleep(60)
        world.node.own = (HERE, moved)
        for peer in world.peers:
            peer.peers[NODE] = (moved,)
        await asyncio.sleep(RETRY_S)
        assert world.own.to_announce() == (moved,)
        assert caplog.text.count("Too many open files") == 1
        running.cancel()
        await asyncio.wait((running,))

    run(case, own=(HERE, NAT))


def test_changed_nat_address_is_noticed_when_the_machine_s_addresses_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = "/ip4/44.0.0.77/tcp/4001"
    let_in(monkeypatch, NAT, moved)

    async def case(world: World) -> None:
        await world.survey.observe()
        running = asyncio.create_task(world.survey.run())
        await asyncio.sleep(1)
        for peer in world.peers:
            peer.peers[NODE] = (moved,)
        await asyncio.sleep(address_survey.LOOK_S * address_survey.OBSERVE_EVERY + 1)
        assert world.own.to_announce() == (moved, LAN)
        running.cancel()
        await asyncio.wait((running,))

    run(case)


def test_addresses_are_confirmed_again_soon_after_the_machine_has_woken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its router has closed the port, and neither the machine nor peers see another address."""
    asleep: list[bool] = []
    monkeypatch.setattr(SuspensionWatch, "was_suspended", lambda _self: bool(asleep and asleep.pop()))
    let_in(monkeypatch, NAT)

    async def case(world: World) -> None:
        await world.survey.observe()
        running = asyncio.create_task(world.survey.run())
        await asyncio.sleep(1)
        assert world.own.reachability == "public"
        let_in(monkeypatch)
        await asyncio.sleep(RETRY_S)
        assert world.own.reachability == "public"
        asleep.append(True)
        await asyncio.sleep(address_survey.WOKEN_S + 2 * address_survey.LOOK_S)
        assert (world.own.reachability, world.own.to_announce()) == ("unknown", (LAN,))
        running.cancel()
        await asyncio.wait((running,))

    run(case)


# --- for peers --------------------------------------------------------------------------------------------------------


async def asked(world: World, *claims: str) -> PathAnswer:
    request = PathAddrs(addrs=claims).to_bytes()
    return PathAnswer.from_bytes(await world.node.call(PEERS[0], f"net/{DIAL_BACK}", request))


def test_dial_back_dials_only_the_ip_at_which_it_sees_the_asker(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = let_in(monkeypatch, NAT, VICTIM, LAN)

    async def case(world: World) -> None:
        assert await asked(world, VICTIM, LAN, CIRCUIT, "/nonsense/x", NAT) == PathAnswer(agreed=True, addrs=(NAT,))
        assert dialled == [(NODE, [NAT])]
        assert await asked(world, VICTIM, LAN) == PathAnswer()
        assert len(dialled) == 1

    run(case)


def test_dial_back_is_refused_to_neighbours_relayed_peers_and_malformed_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled = let_in(monkeypatch, NAT)

    async def case(world: World) -> None:
        peer = world.peers[0]
        peer.peers[NODE] = (CIRCUIT,)
        assert await asked(world, NAT) == PathAnswer()
        peer.peers[NODE] = (NAT,)
        world.carried.add(NODE)  # its connection comes through this process, so it is seen at loopback
        assert await asked(world, NAT) == PathAnswer()
        world.carried.clear()
        assert await world.node.call(PEERS[0], f"net/{DIAL_BACK}", b"\xff") == PathAnswer().to_bytes()
        world.seen_at = ("/ip4/44.0.0.1/tcp/9",)  # the same NAT
        assert await asked(world, NAT) == PathAnswer()
        assert dialled == []

    run(case)


def askers(world: World, num: int, seen_at: str = NAT) -> list[FakeHost]:
    """Return nodes that the first peer sees at an address."""
    before = len(world.hosts)
    hosts = [
        FakeHost(world.hosts, Identity((before + i).to_bytes(2, "big") * 16).peer_id, [seen_at], ())
        for i in range(100, 100 + num)
    ]
    for each in hosts:
        each.meet(world.peers[0])
    return hosts


async def ask_first_peer(host: FakeHost) -> PathAnswer:
    request = PathAddrs(addrs=host.seen_at).to_bytes()
    return PathAnswer.from_bytes(await host.call(PEERS[0], f"net/{DIAL_BACK}", request))


def test_simultaneous_dial_backs_are_bounded_and_a_failure_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = asyncio.Event()

    async def dial_each(_peer_id: str, _addrs: Sequence[str]) -> list[str]:
        await may_go.wait()
        raise StartError("no more processes")

    monkeypatch.setattr(peer_addresses, "_dial_each", dial_each)

    async def case(world: World) -> None:
        *hosts, late = askers(world, MAX_WAITING + 1)
        first = [asyncio.create_task(ask_first_peer(each)) for each in hosts]
        await asyncio.sleep(1)
        assert await ask_first_peer(late) == PathAnswer()
        may_go.set()
        assert await asyncio.gather(*first) == [PathAnswer()] * MAX_WAITING

    run(case)


def test_waiting_dial_backs_are_refused_in_time_when_other_dials_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled = []

    async def dial_each(peer_id: str, addrs: Sequence[str]) -> list[str]:
        dialled.append(peer_id)
        await asyncio.sleep(DIAL_S)
        return list(addrs)

    monkeypatch.setattr(peer_addresses, "_dial_each", dial_each)

    async def case(world: World) -> None:
        *slow, other = askers(world, 9)
        first = [asyncio.create_task(ask_first_peer(each)) for each in slow]
        await asyncio.sleep(TURN_S + 0.1)
        assert sum(each.done() for each in first) >= len(slow) - 2, (
            "they must be refused once they have waited too long"
        )
        began_at = asyncio.get_running_loop().time()
        assert (await ask_first_peer(other)).agreed
        assert asyncio.get_running_loop().time() - began_at <= ASK_S
        await asyncio.gather(*first)
        assert len(dialled) <= 3

    run(case)


def test_peer_is_dialled_back_at_most_five_times_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = let_in(monkeypatch, NAT)

    async def case(world: World) -> None:
        greedy, other = askers(world, 2)
        answers = []
        for _ in range(40):
            answers.append(await ask_first_peer(greedy))
            await asyncio.sleep(0.25)
        assert len(dialled) == MAX_PER_PEER
        assert answers[MAX_PER_PEER:] == [PathAnswer()] * (40 - MAX_PER_PEER)
        assert (await ask_first_peer(other)).agreed, "others must still be dialled back"
        await asyncio.sleep(PERIOD_S)
        assert (await ask_first_peer(greedy)).agreed

    run(case)


def test_peer_has_one_waiting_dial_back_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = asyncio.Event()
    num_dialled = 0

    async def dial_each(_peer_id: str, addrs: Sequence[str]) -> list[str]:
        nonlocal num_dialled
        num_dialled += 1
        await may_go.wait()
        return list(addrs)

    monkeypatch.setattr(peer_addresses, "_dial_each", dial_each)

    async def case(world: World) -> None:
        [host] = askers(world, 1)
        first = asyncio.create_task(ask_first_peer(host))
        await asyncio.sleep(1)
        assert await ask_first_peer(host) == PathAnswer()
        may_go.set()
        assert (await first).agreed
        assert (await ask_first_peer(host)).agreed
        assert num_dialled == 2

    run(case)


def test_dial_backs_are_bounded_for_any_number_of_peer_ids_of_a_network_and_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled = let_in(monkeypatch, NAT)

    async def case(world: World) -> None:
        for network, num_dialled in ((44, MAX_PER_NETWORK), (45, 2 * MAX_PER_NETWORK), (46, MAX_PER_PERIOD)):
            for host in askers(world, 2 * MAX_PER_PERIOD, f"/ip4/{network}.0.0.1/tcp/4001"):
                await ask_first_peer(host)
            assert len(dialled) == num_dialled

    run(case)


def test_slow_dials_of_one_network_do_not_keep_a_peer_of_another_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dial_each(_peer_id: str, addrs: Sequence[str]) -> list[str]:
        await asyncio.sleep(DIAL_S)
        return list(addrs)

    monkeypatch.setattr(peer_addresses, "_dial_each", dial_each)

    async def ask_again_and_again(host: FakeHost, from_s: float) -> None:
        await asyncio.sleep(from_s)
        for _ in range(MAX_PER_PEER):
            await ask_first_peer(host)

    async def case(world: World) -> None:
        [other] = askers(world, 1, "/ip4/45.0.0.1/tcp/4001")
        hosts = askers(world, 8)
        greedy = [asyncio.create_task(ask_again_and_again(each, 0.3 * i)) for i, each in enumerate(hosts)]
        await asyncio.sleep(1.5 * TURN_S)
        assert (await ask_first_peer(other)).agreed
        assert not any(each.done() for each in greedy)
        await asyncio.gather(*greedy)

    run(case)


def test_observe_returns_the_observed_addresses_without_relayed_ones() -> None:
    async def case(world: World) -> None:
        world.peers[0].peers[NODE] = (CIRCUIT, NAT)
        answer = PathAnswer.from_bytes(await world.node.call(PEERS[0], f"net/{OBSERVE}", b""))
        assert answer == PathAnswer(agreed=True, addrs=(NAT,))

    run(case)
