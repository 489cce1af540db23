"""Puts together what a network needs to be dialled, and to dial, over the best paths that there are.

`DirectPaths` holds which addresses are this node's and which are dialled, and turns relays on and off as its addresses
are confirmed or lost. It hooks the dialler into the host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from swarm.network.libp2p.host import Host
from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.multiaddr import is_loopback, parse_peer_addr
from swarm.network.paths.dial_policy import DialPolicy
from swarm.network.paths.dialler import Dialler
from swarm.network.paths.introductions import Introductions, Surroundings
from swarm.network.paths.opener import listen_places
from swarm.network.paths.own_addresses import OwnAddresses
from swarm.network.paths.upgrades import Upgrades
from swarm.network.relay.relay import Relay
from swarm.network.relay.reservations import Reservations


def wants_relays(options: Libp2pOptions) -> bool:
    """Return whether a node that has just started is to ask for relays: not all that it knows is on this machine."""
    return options.relay == "use" or (options.relay == "auto" and not all(map(is_loopback, _given(options))))


class DirectPaths:
    def __init__(
        self,
        host: Host,
        options: Libp2pOptions,
        reservations: Reservations,
        relay: Relay,
        *,
        asked: Callable[[], Sequence[str]],
        on_change: Callable[[tuple[str, ...]], None],
    ) -> None:
        """`asked` returns the peers to ask for this node's addresses; `on_change` is told what to announce."""
        self._host = host
        self._is_auto = options.relay == "auto"
        self._named = _named(options)
        self._given = _given(options)
        self._listen = options.listen
        self._announced = options.announce
        self._reservations = reservations
        self._relay = relay
        self._asked = asked
        self._tell = on_change
        self._direct: tuple[str, ...] = ()
        self._known: object = None
        self._policy: DialPolicy
        self.may_relay = True
        """True while this node's owner lends its link. Read when relaying is decided."""

    async def start(self, tasks: asyncio.TaskGroup, prefix: str, replace: Callable[[str], Awaitable[None]]) -> None:
        """Serve the methods of `prefix`; `replace` reaches a peer anew. Raises PeerUnreachable if the daemon ended."""
        places = listen_places(self._listen, await self._host.addrs())
        surroundings = Surroundings(
            policy=self.policy,
            listen_places=places,
            own_addrs=lambda: self.own.direct,
            is_public=lambda: self.own.reachability == "public",
            own_relays=lambda: self._reservations.held,
            reserved=lambda: self._relay.reserved,
        )
        self._introductions = Introductions(self._host, prefix, tasks, surroundings)
        self.own = OwnAddresses(
            self._host,
            prefix,
            announced=self._announced,
            listen_places=places,
            asked=self._asked,
            relayed=lambda: self._reservations.addrs,
            carried=self._introductions.carried,
            on_change=self.update,
        )
        self._upgrades = Upgrades(self._host, replace, lambda: bool(places) and not self.own.is_behind_symmetric_nat)
        await self._introductions.serve()
        await self.own.serve()
        await self.own.refresh()
        self._host.connect = Dialler(self._host, self._introductions, self.policy, self._upgrades.was_relayed).connect
        tasks.create_task(self._upgrades.run(), name="upgrade paths")

    def policy(self) -> DialPolicy:
        """Return the policy for what is known now. It is made anew only once that has changed."""
        known = self.own.daemons, self._host.connected, frozenset(self._introductions.carried)
        if known != self._known:
            connected = frozenset(peer_id for peer_id, kind in self._host.path_kinds().items() if kind != "relayed")
            self._policy = DialPolicy(own=self.own.daemons, given=self._named, met=self._met(), connected=connected)
        self._known = known  # the same objects, so that the next comparison ends at once
        return self._policy

    def _met(self) -> list[str]:
        """Return the addresses of the connected peers."""
        carried = self._introductions.carried
        return [addr for peer_id, addrs in self._host.connected.items() if peer_id not in carried for addr in addrs]

    def update(self) -> None:
        """Act on what may have changed of this node's addresses and relays: use relays or serve as one, try peers
        again, and announce."""
        if self._is_auto:
            is_local = all(map(is_loopback, (*self._given, *self._met())))
            self._reservations.wanted = not (self.own.is_open or is_local)
            self._relay.serves = self.own.is_open and self.may_relay
        if self.own.direct != self._direct:
            self._direct = self.own.direct
            self._introductions.forget_failures()
            self._upgrades.expect_news()
        self._tell(self.own.to_announce())


def _named(options: Libp2pOptions) -> tuple[str, ...]:
    """Return the addresses that the operator named."""
    return tuple(parse_peer_addr(each).addr for each in options.peers)


def _given(options: Libp2pOptions) -> tuple[str, ...]:
    """Return the addresses that the operator named, or that this node remembers."""
    relays = (parse_peer_addr(each).addr for each in options.relays)
    return (*_named(options), *relays, *(addr for contact in options.remembered for addr in contact.addrs))
