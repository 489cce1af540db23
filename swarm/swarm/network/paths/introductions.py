"""Direct connections between two peers of which at least one is behind a NAT, arranged by a relay that both can reach.

The peer that wants a connection asks a relay of the other for an introduction. The relay tells each of the two where it
sees the other one, at the same moment, and both act by the same rule: the one with the smaller peer id dials, the other
one opens its NAT towards it (`opener`), and dials itself if it finds that the first one can be dialled as it is. So it
makes no difference who asked, and two who ask at once do not disturb each other.

A relay sees a peer at one IP version, and the two may have a direct path by the other one alone. So each of them also
claims an IP of the other version, which the relay passes on: an address of IPv6 that is its own, or the one of IPv4 at
which others see it.

What is refused: a relay introduces only peers that hold a reservation with it, and passes on no further addresses but
those that share the IP at which it sees the peer (in a network behind one NAT also private ones). A node acts only on
the word of relays that it chose, on few addresses, and not often: what a relay names as a peer's may be anybody's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm_protocol import limits
from swarm_protocol.dht_messages import Addrs
from swarm_protocol.errors import PeerError, PeerUnreachable, PeerViolation
from swarm_protocol.path_messages import Introduction, PathAnswer
from swarm_protocol.records import PathKind

from swarm.network.interface import NotServed
from swarm.network.libp2p.host import CONTROL_FAILURES, Host
from swarm.network.multiaddr import dialable, ip_of, is_private, is_tcp_by_ip, tcp_endpoint
from swarm.network.paths.dial_policy import DialPolicy
from swarm.network.paths.opener import ListenEndpoint, NotALibp2pHost, open_path

logger = logging.getLogger(__name__)

INTRODUCE = "paths/introduce"
INTRODUCED = "paths/introduced"

REFUSED = PathAnswer().to_bytes()

ANSWER_S = 3.0
"""Time for a relay's answer, which takes two round trips."""

ATTEMPT_S = 4.0
"""Time from the answer to a connection. It takes one round trip, and a second more where a SYN is dropped."""

POLL_S = 0.02
MAX_POLL_S = 0.2
"""Time between two looks whether the peer has connected itself; it grows by half."""

MAX_ADDRS = 4
"""Addresses of a peer to which this node sends something: of each IP version at ports of one public IP, and of one
private IP, which a neighbour has."""

MAX_ATTEMPTS = 32
"""Maximum attempts at the same time, for all peers together. Each is six SYNs to each address at most."""

RETRY_S = 30.0
"""Time after a failed attempt in which a pair is not introduced again: where NATs do not allow a connection, they still
do not, and some keep a half-open one for as long."""

BURST_S = 10.0
MAX_BURST = 40
"""Introductions that a node takes part in, or a relay makes for one peer, within BURST_S. A round of 64 members makes
63 at once; what is refused goes over the relay, and is tried again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Holds what this node knows about itself and its relays; the functions return what holds now."""

    policy: Callable[[], DialPolicy]
    listen_endpoints: Mapping[int, ListenEndpoint]  # by IP version
    own_addrs: Callable[[], Sequence[str]]  # direct ones, also those at which a NAT or a filter has to be opened
    is_public: Callable[[], bool]
    own_relays: Callable[[], Collection[str]]  # the peers that relay for this node
    reserved: Callable[[], Collection[str]]  # the peers for which this node relays


class Introductions:
    """Asks relays to introduce this node to peers, acts on introductions, and makes them for others."""

    def __init__(self, host: Host, prefix: str, tasks: asyncio.TaskGroup, surroundings: Surroundings) -> None:
        self._host = host
        self._prefix = prefix
        self._tasks = tasks
        self._here = surroundings
        self._attempts: dict[str, asyncio.Task[None]] = {}  # by peer
        self._failed: dict[str, float] = {}  # until when a peer is not tried again
        self._relayed = RateLimit()
        self._told = RateLimit()
        self.carried: set[str] = set()  # peers whose connection this process passes to its daemon

    async def serve(self) -> None:
        await self._host.serve(self._prefix + INTRODUCE, self._introduce)
        await self._host.serve(self._prefix + INTRODUCED, self._take_part)

    def forget_failures(self) -> None:
        """Try all peers again: this node's addresses have changed."""
        self._failed.clear()

    async def connect(self, peer_id: str, relay: str, relay_addrs: Sequence[str]) -> bool:
        """Have `relay` introduce this node to `peer_id`. Return whether there is a direct connection then."""
        if not self._here.listen_endpoints:
            return False  # this node's dials come from a new port each, which the peer's NAT cannot be opened for
        if self._failed.get(peer_id, 0.0) > asyncio.get_running_loop().time():
            return False
        attempt = self._attempts.get(peer_id)
        if attempt is None:
            if self._is_busy():
                return False
            request = Introduction(peer_id=peer_id, addrs=self._shared_addrs())
            try:
                async with asyncio.timeout(ANSWER_S):
                    answer = await self._host.call(
                        relay, self._prefix + INTRODUCE, request.to_bytes(), addrs=relay_addrs
                    )
                addrs = self._usable(PathAnswer.from_bytes(answer).addrs)
            except (PeerError, NotServed, TimeoutError) as error:
                logger.debug("%s does not introduce this node to %s: %s", relay, peer_id, error)
                return False
            attempt = self._begin(peer_id, addrs)
        if attempt is not None:
            await asyncio.wait((attempt,))
        return await self._is_direct(peer_id)

    # --- as the relay of the peer that is wanted ----------------------------------------------------------------------

    async def _introduce(self, asker: str, data: bytes) -> bytes:
        try:
            request = Introduction.from_bytes(data)
        except PeerViolation:
            return REFUSED
        target = request.peer_id
        if target not in self._here.reserved() or target == asker or not self._relayed.takes(asker):
            return REFUSED
        connected = await self._host.connected_peers()
        seen = {peer: _direct(connected.get(peer, ())) for peer in (asker, target)}
        are_neighbours = bool(_ips(seen[asker]) & _ips(seen[target]))
        told = _tellable(request.addrs, seen[asker], are_neighbours=are_neighbours)
        if not told or not seen[target]:
            return REFUSED
        message = Introduction(peer_id=asker, addrs=told).to_bytes()
        try:
            async with asyncio.timeout(ANSWER_S / 2):
                answer = await self._host.call(target, self._prefix + INTRODUCED, message, addrs=())
            agreement = PathAnswer.from_bytes(answer)
        except (PeerError, NotServed, TimeoutError) as error:
            logger.debug("%s is not introduced to %s: %s", asker, target, error)
            return REFUSED
        if not agreement.agreed:
            return REFUSED
        told = _tellable(agreement.addrs, seen[target], are_neighbours=are_neighbours)
        return PathAnswer(agreed=True, addrs=told).to_bytes()

    # --- as the peer that is wanted -----------------------------------------------------------------------------------

    async def _take_part(self, relay: str, data: bytes) -> bytes:
        try:
            request = Introduction.from_bytes(data)
        except PeerViolation:
            return REFUSED
        if relay not in self._here.own_relays() or not self._told.takes(relay):
            return REFUSED
        if not await self._is_direct(request.peer_id):
            if request.peer_id not in self._attempts and self._is_busy():
                return REFUSED
            self._begin(request.peer_id, self._usable(request.addrs))
        return PathAnswer(agreed=True, addrs=self._shared_addrs()).to_bytes()

    # --- both ---------------------------------------------------------------------------------------------------------

    def _is_busy(self) -> bool:
        return len(self._attempts) >= MAX_ATTEMPTS

    def _begin(self, peer_id: str, addrs: Sequence[str]) -> asyncio.Task[None] | None:
        """Begin this node's part in reaching `peer_id`, or join the attempt that is under way. Return None if there is
        no address to try, or if too many attempts are under way."""
        if not addrs:
            return None
        if peer_id not in self._attempts:
            if self._is_busy():
                return None
            self._attempts[peer_id] = self._tasks.create_task(self._attempt(peer_id, addrs))
        return self._attempts[peer_id]

    async def _attempt(self, peer_id: str, addrs: Sequence[str]) -> None:
        opens = self._host.peer_id > peer_id and bool(self._here.listen_endpoints)
        acts = (
            [self._tasks.create_task(self._open(peer_id, addr)) for addr in addrs]
            if opens
            else [self._tasks.create_task(self._dial(peer_id, addrs))]
        )
        pause_s = POLL_S
        try:
            async with asyncio.timeout(ATTEMPT_S):
                while not await self._is_direct(peer_id):  # the other side may dial, too
                    await asyncio.sleep(pause_s)
                    pause_s = min(1.5 * pause_s, MAX_POLL_S)
            self._host.introduced[peer_id] = await self._kind(peer_id)
            self._failed.pop(peer_id, None)
        except TimeoutError:
            self._note_failure(peer_id)
            logger.info("no direct path to %s through %s", peer_id, ", ".join(addrs))
        except PeerUnreachable:
            pass  # the daemon has ended; the unary connection tells why
        finally:
            del self._attempts[peer_id]
            for act in acts:
                if peer_id not in self.carried:
                    act.cancel()

    def _note_failure(self, peer_id: str) -> None:
        now = asyncio.get_running_loop().time()
        self._failed = {each: until for each, until in self._failed.items() if until > now}
        self._failed[peer_id] = now + RETRY_S

    async def _kind(self, peer_id: str) -> PathKind:
        """Return "dialled back" for a connection of which one end can be dialled by anyone, else "punched"."""
        public = [addr for addr in self._host.known_addrs(peer_id) if is_tcp_by_ip(addr) and not is_private(addr)]
        can_be_dialled = self._here.is_public() or any(addr in public for addr in await self._seen(peer_id))
        return "dialled back" if can_be_dialled and peer_id not in self.carried else "punched"

    async def _dial(self, peer_id: str, addrs: Sequence[str]) -> None:
        try:
            await self._host.control.connect(peer_id, addrs)
        except CONTROL_FAILURES as error:
            logger.debug("%s is not dialled: %s", peer_id, error)

    async def _open(self, peer_id: str, addr: str) -> None:
        ip, there = ip_of(addr), tcp_endpoint(addr)
        here = self._here.listen_endpoints.get(ip.version) if ip is not None else None
        if here is None or there is None:
            return
        carries = False

        def opened() -> None:
            nonlocal carries
            carries = True
            self.carried.add(peer_id)

        try:
            if not await open_path(here, there, opened):
                await self._dial(peer_id, [addr])
        except (OSError, TimeoutError, NotALibp2pHost) as error:
            logger.debug("no path to %s at %s: %r", peer_id, addr, error)
        finally:
            if carries:  # another address of the peer may have failed while this one carries
                self.carried.discard(peer_id)

    async def _is_direct(self, peer_id: str) -> bool:
        return bool(await self._seen(peer_id))

    async def _seen(self, peer_id: str) -> tuple[str, ...]:
        return _direct((await self._host.connected_peers()).get(peer_id, ()))

    def _shared_addrs(self) -> Addrs:
        """Return this node's own addresses, for a peer that shares its network, its IP with a forwarded port, or its IP
        version where that is not the relay's."""
        return _told(_direct(self._here.own_addrs()))

    def _usable(self, addrs: Iterable[str]) -> tuple[str, ...]:
        """Return the addresses that this node takes: of each version at one public and at one private IP."""
        return _one_ip_of_each(is_private, _direct(self._here.policy().worth_dialling(addrs)))[:MAX_ADDRS]


class RateLimit:
    """Allows what a peer asks for at most MAX_BURST times within BURST_S."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def takes(self, peer_id: str) -> bool:
        now = asyncio.get_running_loop().time()
        self._times = {each: times for each, times in self._times.items() if times[-1] > now - BURST_S}
        times = self._times.setdefault(peer_id, deque(maxlen=MAX_BURST))
        if len(times) == MAX_BURST and times[0] > now - BURST_S:
            return False
        times.append(now)
        return True


def _direct(addrs: Iterable[str]) -> tuple[str, ...]:
    return tuple(filter(is_tcp_by_ip, addrs))


def _ips(addrs: Iterable[str]) -> set[object]:
    return {ip_of(addr) for addr in addrs}


def _told(addrs: Iterable[str]) -> Addrs:
    """Return of `addrs` those at one public IP of each version, and then the private ones: which of their networks both
    peers share is known to the one that dials."""
    found = _one_ip_of_each(lambda addr: is_private(addr) and ip_of(addr), addrs)
    return tuple(sorted(found, key=is_private))[: limits.MAX_CONTACT_ADDRS]


def _one_ip_of_each(kind: Callable[[str], object], addrs: Iterable[str]) -> tuple[str, ...]:
    """Return of `addrs` those at one IP of each version and kind."""
    ips: dict[object, object] = {}
    found = []
    for addr in addrs:
        ip = ip_of(addr)
        if ip is not None and ips.setdefault((ip.version, kind(addr)), ip) == ip:
            found.append(addr)
    return tuple(found)


def _tellable(claims: Iterable[str], seen: Sequence[str], *, are_neighbours: bool) -> tuple[str, ...]:
    """Return the addresses at which a peer is seen, and of those that it claims the ones that share their IP, are
    private where both peers share it, or have one IP of a version at which it is not seen. Of all else nothing is
    passed on: a peer could have strangers' machines dialled."""
    ips, versions = _ips(seen), {ip.version for addr in seen if (ip := ip_of(addr)) is not None}

    def may_be_its_own(addr: str) -> bool:
        ip = ip_of(addr)
        if ip in ips or is_private(addr):
            return ip in ips or are_neighbours
        return ip is not None and ip.version not in versions

    also = filter(may_be_its_own, _direct(dialable(claims)))
    return _told(dict.fromkeys((*seen, *also)))
