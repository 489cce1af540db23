"""Keeps this node's reservations at up to three relays, in different networks if possible.

`relay_candidates` returns the relays to ask, in order: first relays and seeds that the operator named, then nodes of
the routing table, in an order that differs between nodes, so that the nodes of a network use different relays.
Announced addresses are claims: a relay is used only once it has answered at such an address and has given a
reservation.

A relay that refuses or leaves is replaced by the next candidate, and asked again later. With three relays, the loss of
one interrupts no peer: peers dial addresses of all of them, and this node can still be reached through the other two.
`wanted` turns reservations on and off while the node runs. `run` is a task of the network, and owns one task for each
relay that is asked or held.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import PeerError, PeerRefused, PeerTimeout, PeerUnreachable

from swarm.network.interface import NotServed
from swarm.network.ip_kinds import kind_of, provider_network_of
from swarm.network.libp2p.daemon_control import read_delimited
from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES
from swarm.network.libp2p.host import Host, RawStream
from swarm.network.libp2p.reconnection import accepts_connections
from swarm.network.multiaddr import PeerAddr, ip_of, is_loopback, is_private, is_relayed
from swarm.network.rate import write
from swarm.network.relay.circuit_messages import HOP, MAX_MESSAGE_BYTES, check_hop_accepted, reserve_request

NUM_RELAYS = 3

ANSWER_TIMEOUT_S = 5.0
"""Time for a relay to answer a request for a reservation."""

CALL_POLL_S = 0.05

MIN_PAUSE_S = 0.25
MAX_PAUSE_S = 10.0
"""Pause before a relay that the operator named is asked again; it doubles. Once the relay is back, this node is
reachable again within that time."""

MIN_KNOWN_PAUSE_S = 5.0
MAX_KNOWN_PAUSE_S = 60.0
"""The same pause for other candidates: there may be hundreds, and most of them do not relay.

A pause begins at its minimum again after a reservation that lasted for longer than the longest one: this node tells its
peers of each change, so a relay must not gain and lose it without end.
"""

REMEMBERED_S = 120.0
MAX_REMEMBERED = 1024
"""Relays that failed are remembered for this time after their pause, even while they are no candidates, since a routing
table may lose a node and find it again. While MAX_REMEMBERED are remembered, new candidates are asked only if the
operator named them."""

LOOK_S = 5.0
"""Maximum time between two looks for new candidates."""

RELEASE_S = 60.0
"""Time for which reservations are still held after they are no longer wanted, so that peers can learn the direct
addresses, which they do every half minute from records and requests."""

logger = logging.getLogger(__name__)

MAX_RELAY_ADDRS = 2
"""Maximum addresses of one relay that are dialled and announced, such as an IPv4 and an IPv6 address."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    relay: RelayCandidate
    writer: asyncio.StreamWriter


@dataclass(frozen=True, slots=True)
class _Pause:
    pause_s: float
    until: float


class Reservations:
    """Keeps reservations at up to three relays while they are wanted."""

    def __init__(
        self,
        host: Host,
        candidates: Callable[[], Sequence[RelayCandidate]],
        drop: Callable[[str], Awaitable[None]],
        *,
        wanted: bool,
    ) -> None:
        """`candidates` returns the relays to ask now, the best first. `drop(peer_id)` closes the connections to a peer,
        whose streams go on over the next connection. It raises PeerUnreachable if the daemon has ended."""
        self._host = host
        self._candidates = candidates
        self._drop = drop
        self._wanted = wanted
        self._held: dict[str, _Reservation] = {}
        self._asked: dict[str, RelayCandidate] = {}
        self._pauses: dict[str, _Pause] = {}  # of relays that refused, failed or left, by peer id
        self._changed = asyncio.Event()  # replaced at each change

    @property
    def wanted(self) -> bool:
        """Return whether this node wants to be reached through relays.

        Once it does not, it announces no relayed address, and releases the reservations after RELEASE_S.
        """
        return self._wanted

    @wanted.setter
    def wanted(self, wanted: bool) -> None:
        if wanted != self._wanted:
            self._wanted = wanted
            self._note_change()

    async def changed(self) -> None:
        """Wait until the reservations held, or `wanted`, may have changed."""
        await self._changed.wait()

    @property
    def held(self) -> frozenset[str]:
        """The peer ids of the relays that hold a reservation for this node."""
        return frozenset(self._held)

    @property
    def addrs(self) -> tuple[str, ...]:
        """The relayed addresses at which others reach this node, without its own /p2p. Empty if not `wanted`."""
        relays = [held.relay for held in self._held.values()] if self._wanted else []
        return tuple(f"{addr}/p2p/{relay.peer_id}/p2p-circuit" for relay in relays for addr in relay.addrs)

    async def wait_answered(self, peer_ids: Collection[str]) -> None:
        """Wait until each candidate among `peer_ids` has answered or timed out, or until no reservation is missing."""

        def is_settled() -> bool:
            waited_for = {each.peer_id for each in self._candidates()}.intersection(peer_ids)
            answered = waited_for <= self._held.keys() | self._pauses.keys()
            return answered or not self._wanted or len(self._held) >= NUM_RELAYS

        await self._until(is_settled)

    async def run(self) -> None:
        while True:
            await self._until(lambda: self._wanted)
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(self._keep_reserved())
                await self._until_released()
                keeping.cancel()

    async def _until_released(self) -> None:
        while True:
            await self._until(lambda: not self._wanted)
            try:
                async with asyncio.timeout(RELEASE_S):
                    await self._until(lambda: self._wanted)
            except TimeoutError:
                return

    async def _keep_reserved(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for relay in self._next(loop.time()):
                    self._asked[relay.peer_id] = relay
                    tasks.create_task(self._keep(relay))
                changed = self._changed
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s(loop.time())):
                        await changed.wait()

    def _next(self, now: float) -> list[RelayCandidate]:
        """Return the relays to ask now: first candidates in networks without a relay, then others for the reservations
        that are still missing."""
        if not self._wanted:
            return []
        present = [*(held.relay for held in self._held.values()), *self._asked.values()]
        num_networks = len(present) - len(_redundant(present))
        if num_networks >= NUM_RELAYS:
            return []
        found = self._candidates()
        self._pauses = {each: pause for each, pause in self._pauses.items() if pause.until + REMEMBERED_S > now}
        there = {each.peer_id for each in present}
        ready = [each for each in found if each.peer_id not in there and self._may_be_asked(each, now)]
        taken = {network for each in present for network in each.networks}
        chosen: list[RelayCandidate] = []
        for each in ready:
            if num_networks + len(chosen) < NUM_RELAYS and taken.isdisjoint(each.networks):
                chosen.append(each)
                taken |= each.networks
        num_free = max(0, NUM_RELAYS - len(present) - len(chosen))
        return chosen + [each for each in ready if each not in chosen][:num_free]

    def _may_be_asked(self, relay: RelayCandidate, now: float) -> bool:
        if (pause := self._pauses.get(relay.peer_id)) is not None:
            return pause.until <= now
        return relay.is_given or len(self._pauses) < MAX_REMEMBERED

    def _pause_s(self, now: float) -> float:
        """Return the time until the next look: until a relay may be asked again, at most LOOK_S."""
        waits = [pause.until - now for pause in self._pauses.values() if pause.until > now]
        return min([LOOK_S, *waits])

    async def _keep(self, relay: RelayCandidate) -> None:
        """Ask a relay for a reservation, hold it until the relay leaves, and note when to ask again."""
        try:
            reader, writer = await self._reserve(relay)
        except PeerError as error:
            level = logging.WARNING if relay.is_given and relay.peer_id not in self._pauses else logging.DEBUG
            logger.log(level, "%s gives this node no reservation: %s", relay.peer_id, error)
            self._pause(relay)
        else:
            now_s = asyncio.get_running_loop().time
            held_at_s = now_s()
            await self._hold(relay, reader, writer)
            if now_s() - held_at_s > MAX_KNOWN_PAUSE_S:
                self._pauses.pop(relay.peer_id, None)
            self._pause(relay)
        finally:
            self._asked.pop(relay.peer_id, None)
            self._note_change()

    def _pause(self, relay: RelayCandidate) -> None:
        least, most = (MIN_PAUSE_S, MAX_PAUSE_S) if relay.is_given else (MIN_KNOWN_PAUSE_S, MAX_KNOWN_PAUSE_S)
        before = self._pauses.get(relay.peer_id)
        pause_s = least if before is None else min(2 * before.pause_s, most)
        self._pauses[relay.peer_id] = _Pause(pause_s, asyncio.get_running_loop().time() + pause_s)

    async def _reserve(self, relay: RelayCandidate) -> RawStream:
        """Return the stream whose life is that of the reservation at `relay`. Raises PeerError."""
        peer_id = relay.peer_id
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._prepare(relay)
                reader, writer = await self._host.open_stream(peer_id, HOP, addrs=relay.addrs)
                try:
                    write(writer, reserve_request())
                    check_hop_accepted(await read_delimited(reader, MAX_MESSAGE_BYTES))
                except BaseException:
                    writer.transport.abort()
                    raise
        except TimeoutError:
            raise PeerTimeout(f"no answer within {ANSWER_TIMEOUT_S:.0f} s", peer_id=peer_id) from None
        except NotServed:
            raise PeerRefused("the peer does not relay", peer_id=peer_id) from None
        except ValueError as error:
            raise PeerRefused(f"the peer does not relay for this node: {error}", peer_id=peer_id) from None
        except CONTROL_FAILURES:
            raise PeerUnreachable("the connection to the peer broke", peer_id=peer_id) from None
        return reader, writer

    async def _prepare(self, relay: RelayCandidate) -> None:
        """Close the connections to a relay if all lead through other relays: the relay gives no reservation over them,
        and the daemon makes no direct connection beside them. Wait until no small call with the relay is under way.

        Raises PeerUnreachable if the operator named the relay, and it is neither connected nor there.
        """
        peer_id = relay.peer_id
        addrs = (await self._host.connected_peers()).get(peer_id, ())
        if relay.is_given and not addrs and not any(await asyncio.gather(*map(accepts_connections, relay.addrs))):
            raise PeerUnreachable("no program answers at its addresses", peer_id=peer_id)
        if addrs and all(map(is_relayed, addrs)):
            while self._host.num_calls(peer_id):  # noqa: ASYNC110 - calls end in many places
                await asyncio.sleep(CALL_POLL_S)
            await self._drop(peer_id)

    async def _hold(self, relay: RelayCandidate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold the reservation until the relay leaves, or the reservation is released."""
        del self._asked[relay.peer_id]
        self._held[relay.peer_id] = _Reservation(relay, writer)
        self._release_surplus()
        self._note_change()
        try:
            with contextlib.suppress(ConnectionError):
                await reader.read(1)
        finally:
            del self._held[relay.peer_id]
            writer.transport.abort()

    def _release_surplus(self) -> None:
        """Release reservations beyond NUM_RELAYS, which relays of new networks have exceeded: first those at relays
        that share a network with another one."""
        relays = [held.relay for held in self._held.values()]
        redundant = _redundant(relays)
        for each in sorted(relays, key=lambda each: each in redundant)[NUM_RELAYS:]:
            self._held[each.peer_id].writer.transport.abort()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()


def _redundant(relays: Iterable[RelayCandidate]) -> list[RelayCandidate]:
    """Return the relays that share a network with an earlier one in `relays`."""
    taken: set[str] = set()
    found = []
    for relay in relays:
        if not taken.isdisjoint(relay.networks):
            found.append(relay)
        taken |= relay.networks
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayCandidate:
    """A relay that may be asked. `addrs` are without the final /p2p/<peer_id>. `is_given` means that the operator named
    it."""

    peer_id: str
    addrs: tuple[str, ...]
    is_given: bool

    @property
    def networks(self) -> frozenset[str]:
        """The networks of its public addresses, or its own peer id if it has none. Relays in different networks rarely
        fail together."""
        ips = (ip_of(addr) for addr in self.addrs if is_public(addr))
        return frozenset(str(provider_network_of(ip)) for ip in ips if ip) or frozenset((self.peer_id,))


def is_public(addr: str) -> bool:
    """Return whether an address begins with a public IP address, and leads through no relay."""
    ip = ip_of(addr)
    return ip is not None and kind_of(ip) == "public" and not is_relayed(addr)


def relay_candidates(own_peer_id: str, given: Iterable[PeerAddr], known: Iterable[Contact]) -> list[RelayCandidate]:
    """Return the relays that this node may ask, in order. Of a node that is only `known`, and not `given` by the
    operator, only public addresses are used."""
    found: dict[str, RelayCandidate] = {}
    named: dict[str, list[str]] = {}
    for addr in given:
        named.setdefault(addr.peer_id, []).append(addr.addr)
    for peer_id, addrs in named.items():
        direct = [addr for addr in addrs if not is_relayed(addr)]
        if direct:
            found[peer_id] = RelayCandidate(peer_id=peer_id, addrs=_best_addrs(direct), is_given=True)
    for contact in sorted(known, key=lambda contact: _rank(own_peer_id, contact.peer_id)):
        usable = list(filter(is_public, contact.addrs))
        if usable and contact.peer_id not in found:
            found[contact.peer_id] = RelayCandidate(peer_id=contact.peer_id, addrs=_best_addrs(usable), is_given=False)
    found.pop(own_peer_id, None)
    return list(found.values())


def _best_addrs(addrs: Iterable[str]) -> tuple[str, ...]:
    """Return the best MAX_RELAY_ADDRS addresses: public ones first, and one of each IP version before a second one."""
    num_before: Counter[str] = Counter()
    ranked = []
    for addr in dict.fromkeys(addrs):
        kind = addr.split("/")[1]
        ranked.append((is_loopback(addr), is_private(addr), num_before[kind], addr))
        num_before[kind] += 1
    return tuple(addr for *_, addr in sorted(ranked, key=lambda each: each[:3])[:MAX_RELAY_ADDRS])


@lru_cache(maxsize=4096)
def _rank(own_peer_id: str, peer_id: str) -> bytes:
    return hashlib.sha256(f"{own_peer_id} {peer_id}".encode()).digest()
