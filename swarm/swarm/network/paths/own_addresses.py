"""Learns under which addresses others reach this node, and answers the same question for peers.

Candidates are the daemon's own addresses (interfaces, and what the router maps by UPnP or NAT-PMP), and the listen port
at the IP that peers see. A candidate counts once peers have dialled it: from a temporary host each time, as their own
has a connection already, and libp2p lets a dial succeed only if this node's key answers. A peer dials no IP but the one
at which it sees the asker, so that nobody can have others scanned or flooded.

`observe` asks at which IP peers see this node; `run` is a task that has the candidates dialled, and again when the
machine's addresses or that IP change.

The dials back that peers can have from this node are bounded: each starts a libp2p daemon, a tenth of a second of work.
A peer waits for one at a time and gets few in a minute, which is enough for a node whose addresses change. As peer ids
cost nothing, all peers together are bounded, too: at most a tenth of one core. A peer that is refused asks another one.

A peer may lie about where it sees this node, and which addresses it reaches. So no single one decides where there are
others to ask: two that agree do, and peers at one IP, which may all be one machine, count once. With two peers that
differ nothing is decided. Each IP version is a question of its own, which goes to the peers that are connected by it.

State belongs to the network's loop, whose clock it reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence

from swarm_protocol import limits
from swarm_protocol.errors import PeerError, PeerUnreachable, PeerViolation, StartError
from swarm_protocol.path_messages import PathAddrs, PathAnswer
from swarm_protocol.records import Reachability

from swarm.network.discovery.own_networks import source_addresses
from swarm.network.interface import NotServed
from swarm.network.ip_kinds import IpAddress
from swarm.network.libp2p.host import CONTROL_FAILURES, Host
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.multiaddr import dialable, ip_of, is_loopback, is_private, is_tcp_by_ip, tcp_endpoint
from swarm.network.paths.dial_policy import to_announce
from swarm.network.paths.introductions import REFUSED
from swarm.network.paths.observations import (
    IP_VERSIONS,
    NUM_AGREEING,
    are_decided,
    choose_observers,
    of_version,
    reached_addrs,
    seen_addrs,
    shows_symmetric_nat,
)
from swarm.network.paths.opener import ListenEndpoint
from swarm.network.suspension import SuspensionWatch

logger = logging.getLogger(__name__)

OBSERVE = "paths/observe"
DIAL_BACK = "paths/dial_back"

NUM_ASKED = 4
"""Peers that are asked at most, for one measurement."""

ASK_S = 6.0
DIAL_S = 2.0
"""Time for the dials of one IP version: twice across the world, and a SYN that was lost."""
MAX_DIALS = 4
"""Addresses that are dialled back for one question."""
TURN_S = ASK_S - 2 * DIAL_S
"""Time that a peer waits for its turn to be dialled back. An answer after a longer wait would be too late for it, and
peers that take long to be dialled would have all others refused."""
LOOK_S = 3.0
"""Time between two looks at the machine's own addresses, which cost nothing."""
OBSERVE_EVERY = 20
"""Looks from one question to a peer at which IP it sees this node to the next."""
RETRY_S = 60.0
"""Time after which a node that nobody could reach, or that had nobody to ask, is measured again."""
CONFIRM_S = 900.0
WOKEN_S = 15.0
"""Time after the machine has woken up, in which the dead paths to peers are replaced: whom it asks sooner does not hear
it. A router may have forgotten the port that it had opened."""


MAX_WAITING = 16
"""Peers that wait at the same time. They are served one after the other."""

PERIOD_S = 60.0
MAX_PER_PEER = 5
MAX_PER_PERIOD = 60


class DialBackLimit:
    """Decides which peers are dialled back now."""

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._taken: deque[tuple[float, str]] = deque()  # within the last period: when, and for whom

    def takes(self, peer_id: str) -> bool:
        """Return whether a dial back begins for a peer. If so, the caller tells its end by `done`."""
        now = asyncio.get_running_loop().time()
        while self._taken and self._taken[0][0] <= now - PERIOD_S:
            self._taken.popleft()
        if peer_id in self._waiting or len(self._waiting) >= MAX_WAITING or len(self._taken) >= MAX_PER_PERIOD:
            return False
        if sum(each == peer_id for _, each in self._taken) >= MAX_PER_PEER:
            return False
        self._taken.append((now, peer_id))
        self._waiting.add(peer_id)
        return True

    def done(self, peer_id: str) -> None:
        """Note that the dial back for a peer has ended."""
        self._waiting.discard(peer_id)


class OwnAddresses:
    """Finds out which of this node's addresses others can dial, and dials addresses of peers that ask the same."""

    def __init__(
        self,
        host: Host,
        prefix: str,
        *,
        announced: Sequence[str],
        listen_endpoints: dict[int, ListenEndpoint],
        asked: Callable[[], Sequence[str]],
        relayed: Callable[[], Sequence[str]],
        carried: Collection[str],
        on_change: Callable[[], None],
    ) -> None:
        """`announced` are addresses that the operator gives. Names among them are told, and as peers look no
        names up, so are the addresses at which they find this node. `asked` are the peers to ask, the best ones first;
        `relayed` returns the addresses through relays; `carried` are peers of which this node sees a wrong address."""
        self.reachability: Reachability = "unknown"
        self.measured = asyncio.Event()
        self.is_open = False
        """True once an address was confirmed that no NAT's memory stands behind: of IPv4, which all peers have, unless
        this node listens on IPv6 alone."""
        self.daemons: tuple[str, ...] = ()
        """The daemon's own addresses."""
        self._host = host
        self._prefix = prefix
        self._announced = tuple(announced)
        self._named_ports = [endpoint[1] for addr in announced if not ip_of(addr) and (endpoint := tcp_endpoint(addr))]
        self._listen_endpoints = listen_endpoints
        self._first_version = min(listen_endpoints, default=4)
        self._asked = asked
        self._relayed = relayed
        self._carried = carried
        self._on_change = on_change
        self._confirmed: tuple[str, ...] = ()
        self._seen_at: tuple[str, ...] = ()  # where peers see this node
        self._named_ips: set[object] = set()  # at which single ones have said that they see it
        self.is_behind_symmetric_nat = False
        """True once peers have shown that a NAT gives this node another port for each of them."""
        self._num_looks = 0
        self._was_asked = False  # whether any peer has tried to reach this node
        self._turn = asyncio.Lock()
        self._limit = DialBackLimit()

    async def serve(self) -> None:
        await self._host.serve(self._prefix + OBSERVE, self._observe)
        await self._host.serve(self._prefix + DIAL_BACK, self._dial_back)

    @property
    def direct(self) -> tuple[str, ...]:
        """The addresses without a relay under which others may reach this node, without /p2p."""
        is_local = all(map(is_loopback, self.daemons)) or any(map(is_loopback, self._seen_at))
        first = of_version(self._first_version, self.daemons)
        own = [
            addr
            for addr in self.daemons
            if (is_local or not is_loopback(addr)) and (is_private(addr) or (addr in first and not self._was_asked))
        ]
        return tuple(dict.fromkeys((*self._announced, *self._confirmed, *own)))

    @property
    def possible(self) -> tuple[str, ...]:
        """The addresses at which a peer may reach this node while it lets that peer in: the direct ones, where peers
        see it, and its own address of IPv6."""
        return tuple(dict.fromkeys((*self.direct, *self._seen_at, *self._own_ip6())))

    @property
    def can_be_opened(self) -> bool:
        """Return whether a peer may reach this node while it lets that peer in: no NAT gives it another port for each
        peer, or it has an address of IPv6."""
        return not self.is_behind_symmetric_nat or bool(self._own_ip6())

    def _own_ip6(self) -> list[str]:
        """Return the public addresses of IPv6 from which this node's connections come."""
        sources = source_addresses()
        return [addr for addr in of_version(6, self.daemons) if str(ip_of(addr)) in sources and not is_private(addr)]

    def to_announce(self) -> tuple[str, ...]:
        """Return what others are told: direct addresses and those through relays."""
        return to_announce(self.direct, self._relayed())

    async def refresh(self) -> None:
        """Raises PeerUnreachable if the daemon cannot be asked."""
        self.daemons = await self._host.addrs()

    async def observe(self) -> None:
        """Ask peers at which IP they see this node. Raises PeerUnreachable if the daemon cannot be asked."""
        await self.refresh()
        peers = await self._direct_peers()
        self._named_ips = set()
        found = await asyncio.gather(*(self._observe_by(version, peers.get(version, ())) for version in IP_VERSIONS))
        self._seen_at = tuple(addr for addrs in found for addr in addrs)
        self._on_change()

    async def _observe_by(self, version: int, peers: Sequence[str]) -> Sequence[str]:
        """Return the addresses of an IP version at which `peers`, which are connected by it, see this node."""
        answers = await asyncio.gather(*map(self._ask_seen, peers))
        self._named_ips.update(ip_of(addr) for addrs in answers for addr in addrs)
        seen = [found for addrs in answers if (found := of_version(version, addrs))]
        if not seen:  # a NAT is not forgotten while all peers are connected by IPv6
            here = {ip_of(addr) for addr in self.daemons}
            return [addr for addr in of_version(version, self._seen_at) if version == 4 or ip_of(addr) in here]
        if version == 4:
            self.is_behind_symmetric_nat = shows_symmetric_nat(seen)
        return seen_addrs(seen)

    async def run(self) -> None:
        """Have the addresses confirmed, and again when they change. Where the daemon cannot be asked, that is told once
        and tried again; if it has ended, the network ends this task."""
        trouble = ""
        while True:
            try:
                await self._confirm()
                self.measured.set()
                await self._until_due()
                trouble = ""
                await self.observe()
            except PeerUnreachable as error:
                if error.message != trouble:
                    trouble = error.message
                    logger.warning("cannot find out the addresses of this node: %s", error)
                await asyncio.sleep(LOOK_S)

    async def _until_due(self) -> None:
        """Wait until the addresses are to be confirmed again."""
        loop, suspension, signature = asyncio.get_running_loop(), SuspensionWatch(), await self._signature()
        due_at = loop.time() + (CONFIRM_S if self._confirmed else RETRY_S)
        while True:
            await asyncio.sleep(LOOK_S)
            self._num_looks += 1
            self._on_change()  # peers that were met since may be the first beyond this machine
            if suspension.was_suspended():
                due_at = min(due_at, loop.time() + WOKEN_S)
            asks = self._num_looks % OBSERVE_EVERY == 0
            if (
                loop.time() > due_at
                or await self._signature() != signature
                or (asks and await self._is_seen_elsewhere())
            ):
                return

    async def _signature(self) -> object:
        await self.refresh()
        return source_addresses(), frozenset(self.daemons)

    async def _is_seen_elsewhere(self) -> bool:
        """Return whether a peer sees this node at an IP at which none has seen it before: of IPv6, a machine has
        several, and peers see the one that was the newest when they were connected."""
        known = self._named_ips.union(map(ip_of, self._seen_at))
        asked = [peers[0] for peers in (await self._direct_peers()).values()]
        answers = await asyncio.gather(*map(self._ask_seen, asked))
        return any(seen and not known & {ip_of(addr) for addr in seen} for seen in answers)

    def _candidates(self) -> list[str]:
        """Return addresses at which others may reach this node, the likeliest first."""
        if announced := [addr for addr in self._announced if ip_of(addr)]:
            return [addr for addr in announced if not is_loopback(addr)]
        ips = {ip_of(addr): addr for addr in self._seen_at}
        own = [addr for addr in self.daemons if is_tcp_by_ip(addr) and ip_of(addr) in ips]
        forwarded = [
            f"/ip{ip.version}/{ip}/tcp/{port}"
            for ip in ips
            if ip is not None and ip.version in self._listen_endpoints
            for port in (*self._named_ports, self._listen_endpoints[ip.version].bind[1])
        ]
        found = dict.fromkeys((*own, *forwarded, *ips.values()))
        return [addr for addr in found if not is_loopback(addr)]

    async def _confirm(self) -> None:
        candidates = self._candidates() if self._listen_endpoints else []
        peers = await self._direct_peers() if candidates else {}
        found = await asyncio.gather(
            *(self._reached_by(peers[version], of_version(version, candidates)) for version in peers)
        )
        if answers := {version: addrs for version, addrs in zip(peers, found, strict=True) if addrs is not None}:
            self._was_asked = True
            for version in IP_VERSIONS:
                before = of_version(version, self._confirmed)
                answers.setdefault(version, tuple(addr for addr in before if addr in candidates))
            self._confirmed = tuple(addr for version in IP_VERSIONS for addr in answers[version])
            lasting = list(filter(self._is_lasting, self._confirmed))
            self.is_open = bool(of_version(self._first_version, lasting))
            logger.info("this node is seen at %s, and reached at %s", self._seen_at, self._confirmed)
        self.reachability = "public" if self._confirmed else "relay" if self._relayed() else "unknown"
        self._on_change()

    async def _reached_by(self, peers: Sequence[str], candidates: Sequence[str]) -> tuple[str, ...] | None:
        """Return the candidates that `peers` have reached; None if nobody has tried. All are of one IP version."""
        request = PathAddrs(addrs=tuple(candidates[: limits.MAX_CONTACT_ADDRS])).to_bytes()
        answers: list[list[str]] = []
        while candidates and peers and not are_decided(answers):
            asked, peers = peers[:NUM_AGREEING], peers[NUM_AGREEING:]
            for answer in await asyncio.gather(*(self._ask(peer_id, DIAL_BACK, request) for peer_id in asked)):
                if answer is not None:
                    answers.append([addr for addr in answer.addrs if addr in candidates])
        return reached_addrs(answers, candidates) if answers else None

    def _is_lasting(self, addr: str) -> bool:
        """Return whether no NAT's memory stands behind an address that was reached: it is one of this machine's, or one
        that the operator announced, perhaps by a name."""
        endpoint = tcp_endpoint(addr)
        return addr in (*self._announced, *self.daemons) or (endpoint is not None and endpoint[1] in self._named_ports)

    async def _direct_peers(self) -> dict[int, list[str]]:
        """Return the peers to ask, by the IP version at which they are connected: they see this node at that one."""
        connected = await self._host.connected_peers()
        ips: dict[int, dict[str, IpAddress]] = {}
        for peer_id in self._asked():
            for addr in filter(is_tcp_by_ip, connected.get(peer_id, ())):
                if peer_id not in self._carried and (ip := ip_of(addr)) is not None:
                    ips.setdefault(ip.version, {})[peer_id] = ip
        return {version: choose_observers(peers, NUM_ASKED) for version, peers in ips.items()}

    async def _ask_seen(self, peer_id: str) -> tuple[str, ...]:
        answer = await self._ask(peer_id, OBSERVE, b"")
        return tuple(filter(is_tcp_by_ip, dialable(answer.addrs))) if answer else ()

    async def _ask(self, peer_id: str, method: str, request: bytes) -> PathAnswer | None:
        try:
            async with asyncio.timeout(ASK_S):
                answer = await self._host.call(peer_id, self._prefix + method, request, addrs=())
            found = PathAnswer.from_bytes(answer)
        except (PeerError, NotServed, TimeoutError) as error:
            logger.info("%s does not tell how it sees this node: %s", peer_id, error)
            return None
        return found if found.agreed else None

    # --- for peers ----------------------------------------------------------------------------------------------------

    async def _observe(self, peer_id: str, _request: bytes) -> bytes:
        seen = await self._seen(peer_id)
        return PathAnswer(agreed=bool(seen), addrs=seen).to_bytes()

    async def _dial_back(self, peer_id: str, data: bytes) -> bytes:
        try:
            claims = PathAddrs.from_bytes(data).addrs
        except PeerViolation:
            return REFUSED
        ips = {ip_of(addr) for addr in await self._seen(peer_id)}
        usable = [addr for addr in dialable(claims) if is_tcp_by_ip(addr) and ip_of(addr) in ips][:MAX_DIALS]
        is_neighbour = bool(ips & {ip_of(addr) for addr in self._seen_at}) and not any(map(is_private, usable))
        # behind one NAT a dial says nothing of what others can do
        if not usable or is_neighbour or not self._limit.takes(peer_id):
            return REFUSED
        try:
            async with asyncio.timeout(TURN_S) as waiting, self._turn:
                waiting.reschedule(None)
                reached = await _dial_each(peer_id, usable)
        except TimeoutError:
            return REFUSED
        except StartError as error:
            logger.warning("cannot dial back: %s", error)
            return REFUSED
        finally:
            self._limit.done(peer_id)
        return PathAnswer(agreed=True, addrs=tuple(reached)).to_bytes()

    async def _seen(self, peer_id: str) -> tuple[str, ...]:
        """Return the addresses at which this node sees a peer, none where only relays do."""
        if peer_id in self._carried:
            return ()
        return tuple(filter(is_tcp_by_ip, (await self._host.connected_peers()).get(peer_id, ())))[:NUM_ASKED]


async def _dial_each(peer_id: str, addrs: Sequence[str]) -> list[str]:
    """Return the first address of each IP version at which the peer answers a host that it does not know.

    Raises StartError.
    """
    host = await Host.start(DaemonOptions())
    reached: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.unary.run(), name="dial back")
        try:
            for version in sorted({addr[: len("/ip4/")] for addr in addrs}):
                dialled = [addr for addr in addrs if addr.startswith(version)]
                try:
                    async with asyncio.timeout(DIAL_S):
                        await host.control.connect(peer_id, dialled)
                        found = (await host.control.connected_peers()).get(peer_id, ())
                        reached.extend(addr for addr in dialled if addr in found)
                        await host.control.disconnect(peer_id)
                except (*CONTROL_FAILURES, TimeoutError) as error:
                    logger.info("%s is not reached at %s: %s", peer_id, dialled, error)
        finally:
            await host.stop()  # which ends its calls, too
    return reached
