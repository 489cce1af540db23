"""Lets relays carry connections to this node: keeps reservations at up to three of them, on different networks.

`relay_candidates` says whom to ask, in which order: relays and seeds that the operator named come first, then nodes of
the routing table, in an order that differs between nodes, so that not all of a network use the same relay. What they
announce are claims: a relay is in use only once it has answered at such an address, and has given a reservation.

A relay that refuses or leaves is replaced by the next candidate, and asked again later. With three of them the loss of
one interrupts nobody: peers dial the addresses of all, and this node is there at two others. `wanted` turns it on and
off while the node runs. `run` is a task of the network and owns one task for each relay that is asked or held.
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
from swarm.network.libp2p.host import CONTROL_FAILURES, Host, RawStream
from swarm.network.multiaddr import PeerAddr, ip_of, is_loopback, is_private, is_relayed
from swarm.network.rate import write
from swarm.network.relay.circuit_messages import HOP, MAX_MESSAGE_BYTES, check_hop_accepted, reserve_request

NUM_RELAYS = 3

ANSWER_TIMEOUT_S = 5.0
"""Time for a relay to answer this node's request."""

CALL_POLL_S = 0.05

MIN_PAUSE_S = 0.25
MAX_PAUSE_S = 10.0
"""Pause before a relay that was given is asked again; it grows. The node is reachable again this long after it is back.
"""

MIN_KNOWN_PAUSE_S = 5.0
MAX_KNOWN_PAUSE_S = 60.0
"""The same for the other candidates: there may be hundreds, most of which relay for nobody."""

REMEMBERED_S = 120.0
MAX_REMEMBERED = 1024
"""Relays that failed are remembered for this long beyond their pause, also while they are no candidates: a routing
table loses a node and finds it again. While MAX_REMEMBERED are, only given relays are asked besides them."""

LOOK_S = 5.0
"""Time between two looks for new candidates while reservations are missing."""

RELEASE_S = 60.0
"""Time that reservations are held once they are not wanted any more. Records and requests tell peers the direct
addresses every half minute."""

logger = logging.getLogger(__name__)

MAX_RELAY_ADDRS = 2
"""Addresses of one relay that are dialled and announced, such as one of IPv4 and one of IPv6."""


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
        """`candidates` returns whom to ask now, the best first. `drop(peer_id)` closes the connections to a peer, whose
        streams go on over the next one; it raises PeerUnreachable if the daemon has ended."""
        self._host = host
        self._candidates = candidates
        self._drop = drop
        self._wanted = wanted
        self._held: dict[str, _Reservation] = {}
        self._asked: dict[str, RelayCandidate] = {}
        self._pauses: dict[str, _Pause] = {}  # of relays that refused, failed or left, candidates or not
        self._changed = asyncio.Event()  # replaced at each change

    @property
    def wanted(self) -> bool:
        """Return whether this node is to be reached through relays.

        Once it is not, it announces no address through them, and releases them after RELEASE_S.
        """
        return self._wanted

    @wanted.setter
    def wanted(self, wanted: bool) -> None:
        if wanted != self._wanted:
            self._wanted = wanted
            self._note_change()

    async def changed(self) -> None:
        """Wait until the reservations that are held, or whether they are wanted, may be others."""
        await self._changed.wait()

    @property
    def held(self) -> frozenset[str]:
        """The peer ids of the relays that hold a reservation for this node."""
        return frozenset(self._held)

    @property
    def addrs(self) -> tuple[str, ...]:
        """The addresses through relays at which others reach this node, without its own /p2p."""
        relays = [held.relay for held in self._held.values()] if self._wanted else []
        return tuple(f"{addr}/p2p/{relay.peer_id}/p2p-circuit" for relay in relays for addr in relay.addrs)

    async def wait_answered(self, peer_ids: Collection[str]) -> None:
        """Wait until each candidate of `peer_ids` has answered once or its time is over, or none is
        missing."""

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
        """Return whom to ask now: first of all somebody in each network that is missing, then the others for the
        reservations that are missing."""
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
        """Return the time until the next look: until somebody may be asked again, or new candidates may be known."""
        waits = [pause.until - now for pause in self._pauses.values() if pause.until > now]
        return min([LOOK_S, *waits])

    async def _keep(self, relay: RelayCandidate) -> None:
        """Ask for a reservation, hold it until the relay leaves, and note when to ask again."""
        try:
            reader, writer = await self._reserve(relay)
        except PeerError as error:
            level = logging.WARNING if relay.is_given and relay.peer_id not in self._pauses else logging.DEBUG
            logger.log(level, "not reached through %s: %s", relay.peer_id, error)
            self._pause(relay)
        else:
            self._pauses.pop(relay.peer_id, None)
            await self._hold(relay, reader, writer)
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
        """Return the stream that stands for our reservation at `relay`. Raises PeerError."""
        peer_id = relay.peer_id
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._leave_circuits(peer_id)
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
            raise PeerRefused("it does not relay", peer_id=peer_id) from None
        except ValueError as error:
            raise PeerRefused(f"it does not relay for us: {error}", peer_id=peer_id) from None
        except CONTROL_FAILURES:
            raise PeerUnreachable("it broke off", peer_id=peer_id) from None
        return reader, writer

    async def _leave_circuits(self, peer_id: str) -> None:
        """Close connections that lead to a relay through others, between two small calls: it reserves nothing over
        them, and the daemon makes no direct connection beside them."""
        addrs = (await self._host.connected_peers()).get(peer_id, ())
        if addrs and all(map(is_relayed, addrs)):
            while self._host.num_calls(peer_id):  # noqa: ASYNC110 - a call ends at many places
                await asyncio.sleep(CALL_POLL_S)
            await self._drop(peer_id)

    async def _hold(self, relay: RelayCandidate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold the reservation until the relay leaves, or another one takes its place."""
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
        """Give up, where more than NUM_RELAYS are held since relays of other networks were added, those that share
        theirs."""
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
    """Return the relays that share a network with an earlier one."""
    taken: set[str] = set()
    found = []
    for relay in relays:
        if not taken.isdisjoint(relay.networks):
            found.append(relay)
        taken |= relay.networks
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayCandidate:
    """`addrs` are without the final /p2p/<peer_id>. `is_given`: the operator named it."""

    peer_id: str
    addrs: tuple[str, ...]
    is_given: bool

    @property
    def networks(self) -> frozenset[str]:
        """The networks that its public addresses are in; without any it stands for itself. Relays in different ones
        hardly fail together."""
        ips = (ip_of(addr) for addr in self.addrs if is_public(addr))
        return frozenset(str(provider_network_of(ip)) for ip in ips if ip) or frozenset((self.peer_id,))


def is_public(addr: str) -> bool:
    """Return whether an address names its host by a public IP address, and leads there without a relay."""
    ip = ip_of(addr)
    return ip is not None and kind_of(ip) == "public" and not is_relayed(addr)


def relay_candidates(
    own_peer_id: str, given: Iterable[PeerAddr], known: Iterable[Contact], takes: Callable[[str], bool] = is_public
) -> list[RelayCandidate]:
    """Return whom this node may ask. `takes` decides which addresses of a node that is only `known` are used."""
    found: dict[str, RelayCandidate] = {}
    named: dict[str, list[str]] = {}
    for addr in given:
        named.setdefault(addr.peer_id, []).append(addr.addr)
    for peer_id, addrs in named.items():
        direct = [addr for addr in addrs if not is_relayed(addr)]
        if direct:
            found[peer_id] = RelayCandidate(peer_id=peer_id, addrs=_best(direct), is_given=True)
    for contact in sorted(known, key=lambda contact: _rank(own_peer_id, contact.peer_id)):
        usable = [addr for addr in contact.addrs if takes(addr)]
        if usable and contact.peer_id not in found:
            found[contact.peer_id] = RelayCandidate(peer_id=contact.peer_id, addrs=_best(usable), is_given=False)
    found.pop(own_peer_id, None)
    return list(found.values())


def _best(addrs: Iterable[str]) -> tuple[str, ...]:
    """Return public addresses before others, and of each IP version one before a second one."""
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
