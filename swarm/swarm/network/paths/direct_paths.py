"""Puts together the parts by which a node is dialled, and dials, over the best available paths.

`DirectPaths` keeps this node's addresses and the dial policy, and turns relays on and off as addresses are confirmed or
lost. It sets the host's dialler.

`Upgrades` moves connections that began over a relay to a direct path, including streams in use. A connection leads
through a relay because an attempt failed, or because an address was not known yet. A daemon that holds a relayed
connection makes no other one, so an attempt gives that connection up. Streams resume on the next connection, after a
pause of some seconds if there is still no direct path. So attempts are rare unless there is news: the peer announces an
address that was not tried, or an address of this node has changed. News of a peer that keeps announcing new addresses
soon stops counting. `Upgrades.run` is a task of the network.
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
from swarm.network.paths.address_survey import AddressSurvey
from swarm.network.paths.dial_policy import DialPolicy
from swarm.network.paths.dialler import Dialler
from swarm.network.paths.introductions import Introductions
from swarm.network.paths.opener import listen_endpoints
from swarm.network.paths.own_addresses import OwnAddresses
from swarm.network.paths.peer_addresses import PeerAddresses
from swarm.network.relay.relay import Relay
from swarm.network.relay.reservations import Reservations

logger = logging.getLogger(__name__)

LOOK_S = 5.0
FIRST_S = 60.0
"""Time on a relay before the first attempt. By then NATs have forgotten an earlier attempt of the same two peers."""

MAX_S = 3600.0
GROWTH = 4.0
"""Factor by which the pause before the next attempt grows, up to MAX_S."""

TURN_S = 20.0
"""Time by which the peer with the greater id waits longer, so that both sides do not give the connection up at once."""

ATTEMPT_S = 15.0
MAX_AT_ONCE = 8
"""Maximum attempts at the same time. Other peers wait for the next look."""

FORGET_S = 600.0
"""Time for which the attempts of a disconnected peer are remembered, so that it is not tried sooner by reconnecting."""

MAX_TRIED = 32
"""Maximum tried addresses that are remembered of a peer: four times what it can announce at once. Once as many were
tried, further addresses do not count as news."""


def wants_relays(options: Libp2pOptions) -> bool:
    """Return whether a node that has just started asks for relays: with "use", and with "auto" unless all addresses
    that it knows are on this machine."""
    return options.relay == "use" or (options.relay == "auto" and not all(map(is_loopback, _given(options))))


class DirectPaths:
    """The paths of a node: its own addresses and relays, introductions to others, and the policy for dials."""

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
        """`asked` returns the peers to ask for this node's addresses. `on_change` is called with the addresses to
        announce."""
        self._host = host
        self._options = options
        self._reservations = reservations
        self._relay = relay
        self._asked = asked
        self._tell = on_change
        self._direct: tuple[str, ...] = ()
        self._known: object = None
        self._policy: DialPolicy
        self.may_relay = True
        """True if this node may relay for others once it can be reached. `update` acts on it."""

    async def start(self, tasks: asyncio.TaskGroup, prefix: str, replace: Callable[[str], Awaitable[None]]) -> None:
        """Serve the methods below `prefix`, and set the host's dialler. `replace` closes the connections to a peer and
        dials it again. Raises PeerUnreachable if the daemon has ended."""
        endpoints = listen_endpoints(self._options.listen, await self._host.addrs())
        self.own = OwnAddresses(
            self._host,
            announced=self._options.announce,
            listen_endpoints=endpoints,
            relayed=lambda: self._reservations.addrs,
        )
        self._introductions = Introductions(
            self._host,
            prefix,
            tasks,
            self.own,
            reservations=self._reservations,
            relay=self._relay,
            policy=self.policy,
        )
        carried = self._introductions.carried
        self.survey = AddressSurvey(
            self._host, prefix, self.own, asked=self._asked, carried=carried, on_change=self.update
        )
        self._upgrades = Upgrades(self._host, replace, lambda: bool(endpoints) and self.own.can_be_opened)
        await self._introductions.serve()
        await PeerAddresses(self._host, prefix, carried=carried, seen_at=lambda: self.own.seen_at).serve()
        await self.own.refresh()
        self._host.connect = Dialler(self._host, self._introductions, self.policy, self._upgrades.was_relayed).connect
        tasks.create_task(self._upgrades.run(), name="upgrade paths")

    def policy(self) -> DialPolicy:
        """Return the dial policy for the present addresses and connections. It is cached until these change."""
        known = self.own.daemons, self._host.connected, frozenset(self._introductions.carried)
        if known != self._known:
            connected = frozenset(peer_id for peer_id, kind in self._host.path_kinds().items() if kind != "relayed")
            named = _named(self._options)
            self._policy = DialPolicy(own=self.own.daemons, given=named, met=self._met(), connected=connected)
        self._known = known  # the same objects, so that the next comparison ends at once
        return self._policy

    def _met(self) -> list[str]:
        """Return the addresses of the connected peers, without those whose connection this process passes on."""
        carried = self._introductions.carried
        return [addr for peer_id, addrs in self._host.connected.items() if peer_id not in carried for addr in addrs]

    def update(self) -> None:
        """Act on changes of this node's addresses and relays: use relays or serve as one, try peers again, and
        announce."""
        if self._options.relay == "auto":
            is_local = all(map(is_loopback, (*_given(self._options), *self._met())))
            self._reservations.wanted = self.own.needs_relays and not is_local
            self._relay.serves = self.own.is_open and self.may_relay
        if self.own.direct != self._direct:
            self._direct = self.own.direct
            self._introductions.forget_failures()
            self._upgrades.expect_news()
        self._tell(self.own.to_announce())

    async def follow_relays(self) -> None:
        """Announce addresses through a relay as soon as it holds a reservation, and stop when it is lost, since peers
        may need them at once. The network runs this as a task once it has entered."""
        while True:
            await self._reservations.changed()
            self.update()


def _named(options: Libp2pOptions) -> tuple[str, ...]:
    """Return the addresses that the operator named."""
    return tuple(parse_peer_addr(each).addr for each in options.peers)


def _given(options: Libp2pOptions) -> tuple[str, ...]:
    """Return the addresses that the operator named, those of relays, and those that this node remembers."""
    relays = (parse_peer_addr(each).addr for each in options.relays)
    return (*_named(options), *relays, *(addr for contact in options.remembered for addr in contact.addrs))


@dataclass(slots=True)
class _Relayed:
    due_at: float
    pause_s: float
    tried: frozenset[str]  # direct addresses of the peer that were known at earlier attempts
    seen_at: float


class Upgrades:
    """Tries to replace relayed connections by direct ones: rarely, but sooner when there is news of addresses."""

    def __init__(
        self,
        host: Host,
        replace: Callable[[str], Awaitable[None]],
        may_be_introduced: Callable[[], bool],
    ) -> None:
        """`replace` closes a peer's connection and dials the peer again. It raises PeerError if the peer is not
        reached. `may_be_introduced` returns False while this node can open no NAT; then only new addresses are a reason
        to try."""
        self._host = host
        self._replace = replace
        self._may_be_introduced = may_be_introduced
        self._relayed: dict[str, _Relayed] = {}
        self._tried: set[str] = set()  # the peers of the attempts under way

    def was_relayed(self, peer_id: str) -> bool:
        """Return whether the peer was last connected through a relay, and no attempt to change that is under way."""
        return peer_id in self._relayed and peer_id not in self._tried

    def expect_news(self) -> None:
        """Try all peers at the next look, since this node's addresses have changed."""
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
        """Look at the connections, and return the peers to try, the one due longest first."""
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
