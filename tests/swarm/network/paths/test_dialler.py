"""The order in which paths to a peer are tried: direct, by introduction, through its relays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.daemon_errors import WITHHELD
from swarm.network.libp2p.host import Host
from swarm.network.paths import dialler
from swarm.network.paths.dial_policy import DialPolicy
from swarm.network.paths.dialler import MAX_TOLD, TOLD_S, Dialler, ip4_first, judged
from swarm.network.paths.introductions import Introductions
from swarm.testing import virtual_time
from swarm_protocol.identity import Identity

PEER, RELAY, OTHER_RELAY = (Identity(bytes([i]) * 32).peer_id for i in (1, 2, 3))
FAR, LAN, FOREIGN_LAN = "/ip4/44.7.7.7/tcp/4001", "/ip4/192.168.1.9/tcp/4001", "/ip4/10.9.9.9/tcp/4001"
FAR_IP6 = "/ip6/2a00:7::7/tcp/4001"
CIRCUIT = f"/ip4/44.1.1.1/tcp/4001/p2p/{RELAY}/p2p-circuit"
OTHER_CIRCUIT = f"/ip4/44.2.2.2/tcp/4001/p2p/{OTHER_RELAY}/p2p-circuit"


class World:
    """A peer that is reached at some addresses, is silent at others, and refuses the rest."""

    def __init__(self, reached: Sequence[str], silent: Sequence[str], introduces: Sequence[str]) -> None:
        self.log: list[tuple[str, object]] = []
        self._reached, self._silent, self._introduces = set(reached), set(silent), set(introduces)
        self.introduction_s = 0.0
        self.relayed: set[str] = set()
        self.told_by_itself: list[str] = []  # addresses that each peer has told this node
        host = SimpleNamespace(
            control=SimpleNamespace(connect=self._dial), known_addrs=lambda _peer_id: self.told_by_itself
        )
        introductions = SimpleNamespace(connect=self._introduce)
        policy = DialPolicy(own=("/ip4/192.168.1.2/tcp/4001",), given=(FAR,), connected={OTHER_RELAY})
        self.dialler = Dialler(
            cast(Host, host), cast(Introductions, introductions), lambda: policy, self.relayed.__contains__
        )

    async def _dial(self, _peer_id: str, addrs: Sequence[str]) -> None:
        self.log.append(("dial", tuple(addrs)))
        if self._reached & {*addrs}:
            return
        if self._silent & {*addrs}:
            await asyncio.sleep(5)
            raise ControlError("i/o timeout")
        raise ControlError("connection refused")

    async def _introduce(self, _peer_id: str, relay: str, relay_addrs: Sequence[str]) -> bool:
        self.log.append(("introduce", (relay, tuple(relay_addrs))))
        await asyncio.sleep(self.introduction_s)
        return relay in self._introduces


def run(
    case: Callable[[World], Coroutine[Any, Any, None]],
    *,
    reached: Sequence[str] = (),
    silent: Sequence[str] = (),
    introduces: Sequence[str] = (),
) -> None:
    virtual_time.run(case(World(reached, silent, introduces)))


def test_only_a_direct_address_is_dialled_when_it_answers() -> None:
    async def case(world: World) -> None:
        await world.dialler.connect(PEER, (CIRCUIT, FAR, FOREIGN_LAN, LAN))
        assert world.log == [("dial", (FAR, LAN))], "the private address of another network must not be dialled"

    run(case, reached=[FAR])


@pytest.mark.parametrize("answers", ["IPv4", "IPv6"])
def test_peer_with_both_ip_versions_is_dialled_by_ip4_first(answers: str) -> None:
    async def case(world: World) -> None:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        await world.dialler.connect(PEER, (FAR_IP6, LAN, FAR, CIRCUIT))
        dials = [("dial", (LAN, FAR)), ("dial", (FAR_IP6,))]
        assert world.log == dials[: 1 if answers == "IPv4" else 2]
        assert loop.time() - began_at == (0 if answers == "IPv4" else dialler.DIRECT_S)

    run(case, reached=[FAR] if answers == "IPv4" else [FAR_IP6], silent=[FAR])


def test_neighbour_with_both_ip_versions_is_dialled_in_the_local_network_at_once() -> None:
    async def case(world: World) -> None:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        await world.dialler.connect(PEER, (FAR_IP6, LAN, FAR))
        assert loop.time() == began_at, "a router may not forward packets from its network to its own public address"

    run(case, reached=[LAN], silent=[FAR])


def test_relays_are_tried_with_the_last_direct_addresses_when_a_peer_has_both_ip_versions() -> None:
    assert ip4_first((CIRCUIT, FAR_IP6, FAR)) == [[FAR], [CIRCUIT, FAR_IP6]]
    assert ip4_first((CIRCUIT, FAR_IP6)) == [(CIRCUIT, FAR_IP6)], "the address is the relay's"
    assert ip4_first((CIRCUIT, FAR)) == [(CIRCUIT, FAR)]


def test_introduction_is_tried_before_the_relay_that_makes_it() -> None:
    async def case(world: World) -> None:
        await world.dialler.connect(PEER, (CIRCUIT, OTHER_CIRCUIT))
        asked = [(RELAY, ("/ip4/44.1.1.1/tcp/4001",)), (OTHER_RELAY, ("/ip4/44.2.2.2/tcp/4001",))]
        assert world.log == [("introduce", each) for each in asked]

    run(case, introduces=[OTHER_RELAY], reached=[CIRCUIT])


def test_relays_are_tried_last_and_their_failure_is_reported() -> None:
    async def case(world: World) -> None:
        await world.dialler.connect(PEER, (FAR, CIRCUIT))
        assert world.log[0] == ("dial", (FAR,))
        assert world.log[-1] == ("dial", (CIRCUIT,))
        world._reached.clear()
        with pytest.raises(ControlError, match="connection refused"):
            await world.dialler.connect(PEER, (FAR, CIRCUIT))

    run(case, reached=[CIRCUIT])


@pytest.mark.parametrize(("was_relayed", "seconds"), [(False, 8.0), (True, dialler.RELAYED_AGAIN_S)])
def test_dial_of_a_relayed_peer_waits_a_bounded_time_for_an_introduction(was_relayed: bool, seconds: float) -> None:
    async def case(world: World) -> None:
        world.introduction_s = 4.0
        world.relayed |= {PEER} if was_relayed else set()
        began_at = asyncio.get_running_loop().time()
        await world.dialler.connect(PEER, (CIRCUIT, OTHER_CIRCUIT))
        assert asyncio.get_running_loop().time() - began_at == pytest.approx(seconds)
        assert world.log[-1] == ("dial", (CIRCUIT, OTHER_CIRCUIT))

    run(case, reached=[CIRCUIT])


@pytest.mark.parametrize(("addr", "seconds"), [(LAN, dialler.LOCAL_S), (FAR, dialler.DIRECT_S)])
def test_silent_address_delays_the_dial_of_a_relayed_peer_for_a_bounded_time(addr: str, seconds: float) -> None:
    async def case(world: World) -> None:
        began_at = asyncio.get_running_loop().time()
        await world.dialler.connect(PEER, (addr, CIRCUIT))
        assert asyncio.get_running_loop().time() - began_at == pytest.approx(seconds)

    run(case, silent=[addr], reached=[CIRCUIT])


def test_relay_at_a_refused_address_is_dialled_by_its_id_and_only_if_connected() -> None:
    async def case(world: World) -> None:
        named = tuple(f"{FOREIGN_LAN}/p2p/{relay}/p2p-circuit" for relay in (RELAY, OTHER_RELAY))
        await world.dialler.connect(PEER, named)
        assert world.log == [
            ("introduce", (OTHER_RELAY, (FOREIGN_LAN,))),
            ("dial", (f"/p2p/{OTHER_RELAY}/p2p-circuit",)),
        ]

    run(case, reached=[f"/p2p/{OTHER_RELAY}/p2p-circuit"])


def test_dial_leaves_out_addresses_that_the_policy_refuses() -> None:
    async def main() -> None:
        dialled = []

        async def connect(peer_id: str, addrs: Sequence[str]) -> None:
            dialled.append((peer_id, tuple(addrs)))

        dial = judged(connect, DialPolicy(own=(FAR,), given=()))
        await dial(PEER, (FOREIGN_LAN, FAR, f"{FOREIGN_LAN}/p2p/{RELAY}/p2p-circuit"))
        with pytest.raises(ControlError, match="no addresses"):
            await dial(PEER, (FOREIGN_LAN,))
        assert dialled == [(PEER, (FAR,))]

    virtual_time.run(main())


@pytest.mark.parametrize("addrs", [(), (FOREIGN_LAN,), ("/nonsense",), (f"{FOREIGN_LAN}/p2p/{RELAY}/p2p-circuit",)])
def test_peer_is_not_dialled_when_the_policy_refuses_all_its_addresses(addrs: tuple[str, ...]) -> None:
    async def case(world: World) -> None:
        with pytest.raises(ControlError, match="no addresses"):
            await world.dialler.connect(PEER, addrs)
        assert world.log == []

    run(case, reached=[FOREIGN_LAN])


@pytest.mark.parametrize("way", ["{}", f"{{}}/p2p/{RELAY}/p2p-circuit"])
def test_made_up_peers_at_one_machine_cost_it_a_bounded_number_of_dials(way: str) -> None:
    async def case(world: World) -> None:
        async def dial(peer_id: str, ports: Sequence[int], failure: str | None = None) -> None:
            with pytest.raises(ControlError, match=failure):
                await world.dialler.connect(peer_id, [way.format(f"/ip4/44.9.9.9/tcp/{port}") for port in ports])

        def num_dialled() -> int:
            return sum(len(cast(Sequence[str], addrs)) for act, addrs in world.log if act == "dial")

        for i in range(100):
            await dial(f"made up {i}", range(1, 9))
        assert num_dialled() == MAX_TOLD
        await dial("true peer", [4001], WITHHELD)
        assert num_dialled() == MAX_TOLD, "it cannot be told from a made-up one"
        world.told_by_itself.append(way.format("/ip4/44.9.9.9/tcp/4001"))
        await dial(PEER, [4001, 4002], "connection refused")
        assert num_dialled() == MAX_TOLD + 1, "the peer itself has told one"
        with pytest.raises(ControlError):
            await world.dialler.connect(PEER, [FAR])
        assert num_dialled() == MAX_TOLD + 2, "that is another machine"
        await asyncio.sleep(TOLD_S)
        await dial("made up", [1])
        assert num_dialled() == MAX_TOLD + 3

    run(case)


def test_peers_behind_a_connected_relay_are_dialled_however_many_they_are() -> None:
    async def case(world: World) -> None:
        for i in range(2 * MAX_TOLD):
            await world.dialler.connect(f"peer {i}", [OTHER_CIRCUIT])
        assert len(world.log) == 2 * MAX_TOLD

    run(case, introduces=[OTHER_RELAY])
