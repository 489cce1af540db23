"""Makes direct connections between two peers of which at least one is behind a NAT, by a relay that both can reach.

The peer that wants a connection asks a relay of the other peer for an introduction. The relay tells each of the two at
the same moment where it sees the other one, and both follow the same rule. The peer with the smaller id dials. The one
with the greater id opens its NAT towards the other (`opener`), and dials if it finds that the other can be dialled
without help. So it makes no difference which of them asked, and two requests at once do not disturb each other.

A relay sees a peer by one IP version, but the two peers may have a direct path only by the other version. So each of
them also claims an IP of the other version, which the relay passes on: an IPv6 address of its own, or the IPv4 address
at which others see it.

Bounds: a relay introduces a peer only to peers that hold a reservation at the relay. It passes on no other claimed
addresses than those at the IP at which it sees the claiming peer, private ones if both peers share that IP, and those
of the other IP version. A node accepts introductions only from relays that it chose, tries few addresses, and limits
the rate, since the addresses may be those of strangers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from swarm_protocol import limits
from swarm_protocol.dht_messages import Addrs
from swarm_protocol.errors import PeerError, PeerUnreachable, PeerViolation
from swarm_protocol.path_messages import Introduction, PathAnswer
from swarm_protocol.records import PathKind

from swarm.network.interface import NotServed
from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES
from swarm.network.libp2p.host import Host
from swarm.network.multiaddr import dialable, ip_of, is_private, is_tcp_by_ip, tcp_endpoint
from swarm.network.paths.dial_policy import DialPolicy
from swarm.network.paths.opener import NotALibp2pHost, open_path
from swarm.network.paths.own_addresses import OwnAddresses
from swarm.network.peer_budgets import PeerRateLimit
from swarm.network.relay.relay import Relay
from swarm.network.relay.reservations import Reservations

logger = logging.getLogger(__name__)

INTRODUCE = "paths/introduce"
INTRODUCED = "paths/introduced"

REFUSED = PathAnswer().to_bytes()

ANSWER_S = 3.0
"""Time for a relay's answer, which takes two round trips."""

ATTEMPT_S = 4.0
"""Time from the relay's answer to a connection. It takes one round trip, and a second more if a SYN is dropped."""

POLL_S = 0.02
MAX_POLL_S = 0.2
"""Pause between two checks whether there is a connection; each is half as long again as the last one."""

MAX_ADDRS = 4
"""Maximum addresses of a peer that are tried: for each IP version those at one public IP, and those at one private IP,
for a peer in the same network."""

MAX_ATTEMPTS = 32
"""Maximum attempts at the same time, to all peers together. Each sends at most six SYNs to each address."""

RETRY_S = 30.0
"""Time after a failed attempt in which this node does not ask for another introduction to the peer: NATs that did not
allow the connection still do not, and some keep a half-open connection for this long."""

BURST_S = 10.0
MAX_BURST = 40
"""Maximum introductions within BURST_S that a node accepts from one relay, or that a relay makes for one peer. A round
of 64 members needs 63 at once; refused pairs are connected through the relay, and tried again later."""


class Introductions:
    """Asks relays to introduce this node to peers, acts on introductions, and makes them for others."""

    def __init__(
        self,
        host: Host,
        prefix: str,
        tasks: asyncio.TaskGroup,
        own: OwnAddresses,
        *,
        reservations: Reservations,
        relay: Relay,
        policy: Callable[[], DialPolicy],
    ) -> None:
        """`policy` returns the present dial policy."""
        self._host = host
        self._prefix = prefix
        self._tasks = tasks
        self._own = own
        self._reservations = reservations
        self._relay = relay
        self._policy = policy
        self._attempts: dict[str, asyncio.Task[None]] = {}  # by peer
        self._failed: dict[str, float] = {}  # by peer, the time until which it is not tried again
        self._asked_by_peer = PeerRateLimit[str](period_s=BURST_S, per_peer=MAX_BURST)
        self._asked_by_relay = PeerRateLimit[str](period_s=BURST_S, per_peer=MAX_BURST)
        self.carried: set[str] = set()  # peers whose connection this process passes to its daemon

    async def serve(self) -> None:
        await self._host.serve(self._prefix + INTRODUCE, self._introduce)
        await self._host.serve(self._prefix + INTRODUCED, self._take_part)

    def forget_failures(self) -> None:
        """Allow introductions to all peers again, since this node's addresses have changed."""
        self._failed.clear()

    async def connect(self, peer_id: str, relay: str, relay_addrs: Sequence[str]) -> bool:
        """Have `relay` introduce this node to `peer_id`. Return whether there is then a direct connection."""
        if not self._own.listen_endpoints:
            return False  # each dial of this node comes from a new port, for which no NAT can be opened in advance
        if self._failed.get(peer_id, 0.0) > asyncio.get_running_loop().time():
            return False
        attempt = self._attempts.get(peer_id)
        if attempt is None:
            if self._is_busy():
                return False
            request = Introduction(peer_id=peer_id, addrs=self._shared_addrs()).to_bytes()
            try:
                answer = await self._host.call(
                    relay, self._prefix + INTRODUCE, request, addrs=relay_addrs, timeout_s=ANSWER_S
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
        if target not in self._relay.reserved or target == asker or not self._asked_by_peer.takes(asker):
            return REFUSED
        connected = await self._host.connected_peers()
        seen = {peer: _direct(connected.get(peer, ())) for peer in (asker, target)}
        are_neighbours = bool(_ips(seen[asker]) & _ips(seen[target]))
        passed_on = _to_pass_on(request.addrs, seen[asker], are_neighbours=are_neighbours)
        if not passed_on or not seen[target]:
            return REFUSED
        message = Introduction(peer_id=asker, addrs=passed_on).to_bytes()
        try:
            method = self._prefix + INTRODUCED
            answer = await self._host.call(target, method, message, addrs=(), timeout_s=ANSWER_S / 2)
            agreement = PathAnswer.from_bytes(answer)
        except (PeerError, NotServed, TimeoutError) as error:
            logger.debug("%s is not introduced to %s: %s", asker, target, error)
            return REFUSED
        if not agreement.agreed:
            return REFUSED
        passed_on = _to_pass_on(agreement.addrs, seen[target], are_neighbours=are_neighbours)
        return PathAnswer(agreed=True, addrs=passed_on).to_bytes()

    # --- as the peer that is wanted -----------------------------------------------------------------------------------

    async def _take_part(self, relay: str, data: bytes) -> bytes:
        try:
            request = Introduction.from_bytes(data)
        except PeerViolation:
            return REFUSED
        if relay not in self._reservations.held or not self._asked_by_relay.takes(relay):
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
        """Start this node's part of an attempt, or return the attempt that is under way. Return None if there is no
        address to try, or if too many attempts are under way."""
        if not addrs:
            return None
        if peer_id not in self._attempts:
            if self._is_busy():
                return None
            self._attempts[peer_id] = self._tasks.create_task(self._attempt(peer_id, addrs))
        return self._attempts[peer_id]

    async def _attempt(self, peer_id: str, addrs: Sequence[str]) -> None:
        opens = self._host.peer_id > peer_id and bool(self._own.listen_endpoints)
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
            now = asyncio.get_running_loop().time()
            self._failed = {each: until for each, until in self._failed.items() if until > now}
            self._failed[peer_id] = now + RETRY_S
            logger.info("no direct path to %s through %s", peer_id, ", ".join(addrs))
        except PeerUnreachable:
            pass  # the daemon has ended, which the unary connection reports
        finally:
            del self._attempts[peer_id]
            for act in acts:
                if peer_id not in self.carried:
                    act.cancel()

    async def _kind(self, peer_id: str) -> PathKind:
        """Return "dialled back" for a connection if one of its ends can be dialled by anyone, else "punched"."""
        public = [addr for addr in self._host.known_addrs(peer_id) if is_tcp_by_ip(addr) and not is_private(addr)]
        can_be_dialled = self._own.reachability == "public" or any(addr in public for addr in await self._seen(peer_id))
        return "dialled back" if can_be_dialled and peer_id not in self.carried else "punched"

    async def _dial(self, peer_id: str, addrs: Sequence[str]) -> None:
        try:
            await self._host.control.connect(peer_id, addrs)
        except CONTROL_FAILURES as error:
            logger.debug("%s is not dialled: %s", peer_id, error)

    async def _open(self, peer_id: str, addr: str) -> None:
        ip, there = ip_of(addr), tcp_endpoint(addr)
        here = self._own.listen_endpoints.get(ip.version) if ip is not None else None
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
            if carries:  # not if another address of the peer carries the connection
                self.carried.discard(peer_id)

    async def _is_direct(self, peer_id: str) -> bool:
        return bool(await self._seen(peer_id))

    async def _seen(self, peer_id: str) -> tuple[str, ...]:
        return _direct((await self._host.connected_peers()).get(peer_id, ()))

    def _shared_addrs(self) -> Addrs:
        """Return the addresses that this node claims: for a peer in the same network, for a forwarded port at the IP
        that the relay sees, and for the IP version by which the relay does not see this node."""
        return _to_share(_direct(self._own.possible))

    def _usable(self, addrs: Iterable[str]) -> tuple[str, ...]:
        """Return the addresses to try: for each IP version those at one public and at one private IP."""
        return _one_ip_of_each(is_private, _direct(self._policy().worth_knowing(addrs)))[:MAX_ADDRS]


def _direct(addrs: Iterable[str]) -> tuple[str, ...]:
    return tuple(filter(is_tcp_by_ip, addrs))


def _ips(addrs: Iterable[str]) -> set[object]:
    return {ip_of(addr) for addr in addrs}


def _to_share(addrs: Iterable[str]) -> Addrs:
    """Return those of `addrs` at one public IP of each version, then all private ones, since only the peer that dials
    knows which network both share."""
    found = _one_ip_of_each(lambda addr: is_private(addr) and ip_of(addr), addrs)
    return tuple(sorted(found, key=is_private))[: limits.MAX_CONTACT_ADDRS]


def _one_ip_of_each(kind: Callable[[str], object], addrs: Iterable[str]) -> tuple[str, ...]:
    """Return those of `addrs` at the first IP of each IP version and `kind`."""
    ips: dict[object, object] = {}
    found = []
    for addr in addrs:
        ip = ip_of(addr)
        if ip is not None and ips.setdefault((ip.version, kind(addr)), ip) == ip:
            found.append(addr)
    return tuple(found)


def _to_pass_on(claims: Iterable[str], seen: Sequence[str], *, are_neighbours: bool) -> tuple[str, ...]:
    """Return the addresses that a relay passes on: those at which it sees a peer, and the claims that share their IP,
    are private while both peers share that IP, or are of an IP version by which it does not see the peer. With other
    claims, a peer could have strangers' machines dialled."""
    ips, versions = _ips(seen), {ip.version for addr in seen if (ip := ip_of(addr)) is not None}

    def may_be_its_own(addr: str) -> bool:
        ip = ip_of(addr)
        if ip in ips or is_private(addr):
            return ip in ips or are_neighbours
        return ip is not None and ip.version not in versions

    also = filter(may_be_its_own, _direct(dialable(claims)))
    return _to_share(dict.fromkeys((*seen, *also)))
