"""The policy for peers' announced addresses, which all direct paths of a node share."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.paths.direct_paths import DirectPaths
from swarm.network.relay.reservations import Reservations
from swarm.testing import virtual_time
from swarm_protocol.dht_messages import Contact
from swarm_protocol.identity import Identity

PEER, RELAY, NEIGHBOUR = (Identity(bytes([i]) * 32).peer_id for i in (1, 2, 3))
FAR, LAN, OTHER_LAN = "/ip4/44.7.7.7/tcp/4001", "/ip4/192.168.1.9/tcp/4001", "/ip4/10.0.0.9/tcp/4001"


def paths(tmp_path: Path, *, connected: dict[str, tuple[str, ...]], **options: Any) -> DirectPaths:
    host: Any = SimpleNamespace(connected=connected)
    host.path_kinds = lambda: {
        peer_id: "relayed" if all("p2p-circuit" in addr for addr in addrs) else "direct"
        for peer_id, addrs in host.connected.items()
    }
    rest: Any = None
    found = DirectPaths(
        host,
        Libp2pOptions(identity_path=tmp_path, network_id="test", **options),
        rest,
        rest,
        asked=lambda: (),
        on_change=lambda _addrs: None,
    )
    found.own = SimpleNamespace(daemons=(FAR,))  # type: ignore[assignment]
    found._introductions = SimpleNamespace(carried=set())  # type: ignore[assignment]
    return found


def test_policy_is_made_again_only_when_the_known_addresses_change(tmp_path: Path) -> None:
    here = paths(tmp_path, connected={})
    first = here.policy()
    assert here.policy() is first
    here._host.connected = {NEIGHBOUR: (LAN,)}
    second = here.policy()
    assert not first.takes(LAN)
    assert second.takes(LAN)
    assert here.policy() is second
    here._introductions.carried.add(NEIGHBOUR)  # the daemon sees this process's own address
    assert not here.policy().takes(LAN)


def test_remembered_addresses_alone_allow_no_private_network(tmp_path: Path) -> None:
    remembered = (Contact(peer_id=PEER, addrs=(OTHER_LAN,)),)
    known = paths(tmp_path, connected={}, remembered=remembered, relays=(f"{OTHER_LAN}/p2p/{PEER}",))
    assert not known.policy().takes(OTHER_LAN)
    assert paths(tmp_path, connected={}, peers=(f"{OTHER_LAN}/p2p/{PEER}",)).policy().takes(OTHER_LAN)


def test_relay_is_announced_while_it_holds_a_reservation(tmp_path: Path) -> None:
    async def main() -> None:
        relays, told = Relays(), list[tuple[str, ...]]()
        here = paths(tmp_path, connected={})
        here._reservations, here._tell = relays, told.append  # type: ignore[assignment]
        own = SimpleNamespace(is_open=False, needs_relays=True, direct=(), to_announce=lambda: relays.addrs)
        here.own = own  # type: ignore[assignment]
        here._relay = SimpleNamespace(serves=False)  # type: ignore[assignment]
        following = asyncio.create_task(here.follow_relays())
        for addrs in ((FAR,), (FAR, LAN), ()):
            await asyncio.sleep(0)
            relays.now(addrs)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert told[-1] == addrs
        assert len(told) == 3
        following.cancel()

    virtual_time.run(main())


class Relays(Reservations):
    """Reservations at relays that a test gives and takes away."""

    def __init__(self) -> None:
        super().__init__(Any, lambda: (), Any, wanted=True)  # type: ignore[arg-type]
        self._addrs: tuple[str, ...] = ()

    @property
    def addrs(self) -> tuple[str, ...]:
        return self._addrs

    def now(self, addrs: tuple[str, ...]) -> None:
        self._addrs = addrs
        self._note_change()


def test_relay_counts_as_connected_only_when_its_connection_is_direct(tmp_path: Path) -> None:
    circuit = f"{OTHER_LAN}/p2p/{RELAY}/p2p-circuit"
    assert paths(tmp_path, connected={RELAY: (FAR,)}).policy().takes(circuit)
    through_another = {RELAY: (f"{FAR}/p2p/{PEER}/p2p-circuit",)}
    assert not paths(tmp_path, connected=through_another).policy().takes(circuit)
