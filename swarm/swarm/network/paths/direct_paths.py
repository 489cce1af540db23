"""Puts together what a network needs to be dialled, and to dial, over the best paths that there are.

`DirectPaths` holds which addresses are this node's and which are dialled, and turns relays on and off as its addresses
are confirmed or lost. It hooks the dialler into the host.

`Upgrades` moves connections that began over a relay to a direct path, streams in use included. A pair ends on a relay
because an attempt failed, or because an address was not known yet. A daemon that holds a relayed connection makes no
other, so an attempt means to give that connection up: streams are resumed on the next one, which costs them a pause of
some seconds where there is still no direct path. So attempts are few, unless there is news: the peer announces an
address that was not tried, or an own address has changed. A peer that announces ever new ones is soon not heeded any
more. `Upgrades.run` is a task of the network.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarm_protocol.errors import PeerError

from swarm.network.libp2p.host import Host
from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.multiaddr import is_loopback, is_relayed, parse_peer_addr
from swarm.network.paths.dial_policy import DialPolicy
from swarm.network.paths.dialler import Dialler
from swarm.network.paths.introductions import Introductions, Surroundings
from swarm.network.paths.opener import listen_endpoints
from swarm.network.paths.own_addresses import OwnAddresses
from swarm.network.relay.relay import Relay
from swarm.network.relay.reservations import Reservations

logger = logging.getLogger(__name__)

LOOK_S = 5.0
FIRST_S = 60.0
"""Time on a relay before the first attempt. An attempt of the same pair that failed has left NATs by then."""

MAX_S = 3600.0
GROWTH = 4.0
"""The pause to the next attempt is so many times as long, up to MAX_S."""

TURN_S = 20.0
"""Time by which the peer with the greater id is later, so that not both sides give the connection up at once."""

ATTEMPT_S = 15.0
MAX_AT_ONCE = 8
"""Attempts at the same time. Others wait for the next look."""

FORGET_S = 600.0
"""Time for which attempts are remembered of a peer that is not connected: leaving is no way to be tried anew."""

MAX_TRIED = 32
"""Addresses of a peer that are remembered as tried: four times what it can announce at once. Others are no news."""


def wants_relays(options: Libp2pOptions) -> bool:
    """Return whether a node that has just started is to ask for relays: not all that it knows is on this machine."""
    return options.relay == "use" or (options.relay == "auto" and not all(map(is_loopback, _given(options))))


class DirectPaths:
    """The paths of a node: its own addresses and relays, introductions to others, and which addresses it dials."""

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
        endpoints = listen_endpoints(self._listen, await self._host.addrs())
        surroundings = Surroundings(
            policy=self.policy,
            listen_endpoints=endpoints,
            own_addrs=lambda: self.own.possible,
            is_public=lambda: self.own.reachability == "public",
            own_relays=lambda: self._reservations.held,
            reserved=lambda: self._relay.reserved,
        )
        self._introductions = Introductions(self._host, prefix, tasks, surroundings)
        self.own = OwnAddresses(
            self._host,
            prefix,
            announced=self._announced,
            listen_endpoints=endpoints,
            asked=self._asked,
            relayed=lambda: self._reservations.addrs,
            carried=self._introductions.carried,
            on_change=self.update,
        )
        self._upgrades = Upgrades(self._host, replace, lambda: bool(endpoints) and self.own.can_be_opened)
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

    async def follow_relays(self) -> None:
        """Announce a relay as soon as it holds a place, and a lost one no more: the others may need it at the next
        moment. A task of the network, once there is somebody to tell."""
        while True:
            await self._reservations.changed()
            self.update()


def _named(options: Libp2pOptions) -> tuple[str, ...]:
    """Return the addresses that the operator named."""
    return tuple(parse_peer_addr(each).addr for each in options.peers)


def _given(options: Libp2pOptions) -> tuple[str, ...]:
    """Return the addresses that the operator named, or that this node remembers."""
    relays = (parse_peer_addr(each).addr for each in options.relays)
    return (*_named(options), *relays, *(addr for contact in options.remembered for addr in contact.addrs))


@dataclass(slots=True)
class _Relayed:
    due_at: float
    pause_s: float
    tried: frozenset[str]  # direct addresses of the peer that attempts have known
    seen_at: float


class Upgrades:
    """Tries to replace relayed connections by direct ones, seldom, and sooner when there is news of addresses."""

    def __init__(
        self,
        host: Host,
        replace: Callable[[str], Awaitable[None]],
        may_be_introduced: Callable[[], bool],
    ) -> None:
        """`replace` gives a peer's connection up and reaches it anew. It raises PeerError if that leads nowhere. While
        this node can open no NAT, `may_be_introduced` returns False, and only new addresses are a reason to try."""
        self._host = host
        self._replace = replace
        self._may_be_introduced = may_be_introduced
        self._relayed: dict[str, _Relayed] = {}
        self._tried: set[str] = set()  # the peers of attempts that are under way

    def was_relayed(self, peer_id: str) -> bool:
        """Return whether a relay led to the peer when it was last seen, and no attempt to change that is under way."""
        return peer_id in self._relayed and peer_id not in self._tried

    def expect_news(self) -> None:
        """Try all peers soon: this node's addresses have changed."""
        now = asyncio.get_running_loop().time()
        for each in self._relayed.values():
            each.due_at, each.pause_s = now, FIRST_S

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            async with asyncio.TaskGroup() as attempts:
                for peer_id in self._due()[:MAX_AT_ONCE]:
                    attempts.create_task(self._try(peer_id))

    def _due(self) -> list[str]:
        """Look at the connections, and return the peers to try, with the one that has waited longest first."""
        now = asyncio.get_running_loop().time()
        kinds = self._host.path_kinds()
        known = {
            peer_id: each
            for peer_id, each in self._relayed.items()
            if peer_id not in kinds and each.seen_at > now - FORGET_S
        }
        relayed = [peer_id for peer_id, kind in kinds.items() if kind == "relayed"]
        for peer_id in relayed:
            turn_s = TURN_S if self._host.peer_id > peer_id else 0.0
            each = self._relayed.get(peer_id)
            known[peer_id] = each or _Relayed(now + FIRST_S + turn_s, FIRST_S, self._direct(peer_id), now)
            known[peer_id].seen_at = now
        self._relayed = known
        is_able = self._may_be_introduced()
        due = [
            peer_id
            for peer_id in relayed
            if (is_able and known[peer_id].due_at <= now) or self._has_news(peer_id, known[peer_id])
        ]
        return sorted(due, key=lambda peer_id: known[peer_id].due_at)

    def _has_news(self, peer_id: str, each: _Relayed) -> bool:
        return len(each.tried) < MAX_TRIED and not each.tried.issuperset(self._direct(peer_id))

    def _direct(self, peer_id: str) -> frozenset[str]:
        return frozenset(addr for addr in self._host.known_addrs(peer_id) if not is_relayed(addr))

    async def _try(self, peer_id: str) -> None:
        each = self._relayed[peer_id]
        if len(each.tried) < MAX_TRIED:
            each.tried |= self._direct(peer_id)
        each.pause_s = min(each.pause_s * GROWTH, MAX_S)
        each.due_at = asyncio.get_running_loop().time() + each.pause_s
        self._tried.add(peer_id)
        try:
            async with asyncio.timeout(ATTEMPT_S):
                await self._replace(peer_id)
        except (PeerError, TimeoutError) as error:
            logger.info("no direct path to %s instead of the relayed one: %s", peer_id, error)
        finally:
            self._tried.discard(peer_id)
