"""Finds out at which addresses others reach this node, and keeps `own_addresses` up to date.

Candidates are the daemon's own addresses (those of interfaces, and those that the router maps by UPnP or NAT-PMP), and
the listen port at the IP that peers see. A candidate counts once peers have dialled it (`peer_addresses`).

`observe` asks peers at which IP they see this node. `run` is a task that has the candidates dialled, and again when the
machine's addresses or that IP change.

A peer may lie about where it sees this node, and about the addresses that it reaches. So no single peer decides if
there are others to ask: two must agree. Peers at one IP count once, since they may be one machine. If only two peers
answer, and they differ, nothing is decided. Each IP version is a separate question, which goes to the peers connected
by it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from swarm_protocol import limits
from swarm_protocol.errors import PeerError, PeerUnreachable
from swarm_protocol.path_messages import PathAddrs, PathAnswer

from swarm.network.discovery.own_networks import source_addresses
from swarm.network.interface import NotServed
from swarm.network.ip_kinds import IpAddress, local_network_of, provider_network_of
from swarm.network.libp2p.host import Host
from swarm.network.multiaddr import dialable, ip_of, is_tcp_by_ip
from swarm.network.paths.own_addresses import OwnAddresses, of_version
from swarm.network.paths.peer_addresses import ASK_S, DIAL_BACK, OBSERVE
from swarm.network.suspension import SuspensionWatch

logger = logging.getLogger(__name__)

IP_VERSIONS = (4, 6)

NUM_ASKED = 4
"""Maximum peers that are asked for one measurement."""
NUM_AGREEING = 2
"""Peers that must agree, if at least that many have answered."""

LOOK_S = 3.0
"""Time between two looks at the machine's own addresses, which cost nothing."""
OBSERVE_EVERY = 20
"""Number of looks after which a peer is asked again at which IP it sees this node."""
RETRY_S = 60.0
"""Time after which a node is measured again if no peer reached it, or if it had no peer to ask."""
CONFIRM_S = 900.0
"""Time after which confirmed addresses are measured again."""
WOKEN_S = 15.0
"""Time after the machine has woken up until its addresses are measured again, since a router may have forgotten its
mappings. Before that, peers would not hear the requests: dead paths to them have to be replaced first."""


class AddressSurvey:
    """Asks peers about this node's `own` addresses."""

    def __init__(
        self,
        host: Host,
        prefix: str,
        own: OwnAddresses,
        *,
        asked: Callable[[], Sequence[str]],
        carried: Collection[str],
        on_change: Callable[[], None],
    ) -> None:
        """`asked` returns the peers to ask, the best first. `carried` are peers of which this node sees a wrong
        address."""
        self.measured = asyncio.Event()
        self._host = host
        self._prefix = prefix
        self._own = own
        self._asked = asked
        self._carried = carried
        self._on_change = on_change
        self._named_ips: set[object] = set()  # the IPs at which any single peer said that it sees this node
        self._num_looks = 0

    async def observe(self) -> None:
        """Ask peers at which IP they see this node. Raises PeerUnreachable if the daemon cannot be asked."""
        await self._own.refresh()
        peers = await self._direct_peers()
        self._named_ips = set()
        found = await asyncio.gather(*(self._observe_by(version, peers.get(version, ())) for version in IP_VERSIONS))
        self._own.seen_at = tuple(addr for addrs in found for addr in addrs)
        self._on_change()

    async def _observe_by(self, version: int, peers: Sequence[str]) -> Sequence[str]:
        """Return the addresses of one IP version at which peers see this node. `peers` are connected by that
        version."""
        answers = await asyncio.gather(*map(self._ask_seen, peers))
        self._named_ips.update(ip_of(addr) for addrs in answers for addr in addrs)
        seen = [found for addrs in answers if (found := of_version(version, addrs))]
        if not seen:  # no peer of this IP version has answered, so earlier answers hold
            here = {ip_of(addr) for addr in self._own.daemons}
            return [addr for addr in of_version(version, self._own.seen_at) if version == 4 or ip_of(addr) in here]
        if version == 4:
            self._own.is_behind_symmetric_nat = shows_symmetric_nat(seen)
        return seen_addrs(seen)

    async def run(self) -> None:
        """Have the addresses confirmed, and again when they change. A daemon that cannot be asked is logged once, and
        asked again. If it has ended, the network ends this task."""
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
        due_at = loop.time() + (CONFIRM_S if self._own.reachability == "public" else RETRY_S)
        while True:
            await asyncio.sleep(LOOK_S)
            self._num_looks += 1
            self._on_change()  # a new connection may be the first beyond this machine
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
        await self._own.refresh()
        return source_addresses(), frozenset(self._own.daemons)

    async def _is_seen_elsewhere(self) -> bool:
        """Return whether a peer sees this node at an IP that no peer has named before. All named IPs count, since a
        machine has several IPv6 addresses, and a peer sees the one that was newest when it connected."""
        known = self._named_ips.union(map(ip_of, self._own.seen_at))
        asked = [peers[0] for peers in (await self._direct_peers()).values()]
        answers = await asyncio.gather(*map(self._ask_seen, asked))
        return any(seen and not known & {ip_of(addr) for addr in seen} for seen in answers)

    async def _confirm(self) -> None:
        candidates = self._own.candidates()
        peers = await self._direct_peers() if candidates else {}
        found = await asyncio.gather(
            *(self._reached_by(peers[version], of_version(version, candidates)) for version in peers)
        )
        if answers := {version: addrs for version, addrs in zip(peers, found, strict=True) if addrs is not None}:
            self._own.was_asked = True
            for version in IP_VERSIONS:
                before = of_version(version, self._own.confirmed)
                answers.setdefault(version, tuple(addr for addr in before if addr in candidates))
            self._own.confirmed = tuple(addr for version in IP_VERSIONS for addr in answers[version])
            logger.info("this node is seen at %s, and reached at %s", self._own.seen_at, self._own.confirmed)
        self._on_change()

    async def _reached_by(self, peers: Sequence[str], candidates: Sequence[str]) -> tuple[str, ...] | None:
        """Return the candidates that `peers` have reached, or None if no peer has answered. All are of one IP
        version."""
        request = PathAddrs(addrs=tuple(candidates[: limits.MAX_CONTACT_ADDRS])).to_bytes()
        answers: list[list[str]] = []
        while candidates and peers and not are_decided(answers):
            asked, peers = peers[:NUM_AGREEING], peers[NUM_AGREEING:]
            for answer in await asyncio.gather(*(self._ask(peer_id, DIAL_BACK, request) for peer_id in asked)):
                if answer is not None:
                    answers.append([addr for addr in answer.addrs if addr in candidates])
        return reached_addrs(answers, candidates) if answers else None

    async def _direct_peers(self) -> dict[int, list[str]]:
        """Return the peers to ask, by the IP version by which they are connected and so see this node."""
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
            answer = await self._host.call(peer_id, self._prefix + method, request, addrs=(), timeout_s=ASK_S)
            found = PathAnswer.from_bytes(answer)
        except (PeerError, NotServed, TimeoutError) as error:
            logger.info("%s does not answer %s: %s", peer_id, method, error)
            return None
        return found if found.agreed else None


def choose_observers(peers: Mapping[str, IpAddress], num: int) -> list[str]:
    """Return up to `num` peers to ask, from `peers` and their IPs: first one peer of each provider's network, then
    others, but only one of each machine."""
    first: list[str] = []
    others: list[str] = []
    machines, networks = set(), set()
    for peer_id, ip in peers.items():
        machine, network = local_network_of(ip) if ip.version == 6 else ip, provider_network_of(ip)
        if machine not in machines:
            (others if network in networks else first).append(peer_id)
        machines.add(machine)
        networks.add(network)
    return [*first, *others][:num]


def seen_addrs(seen: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the addresses whose IP enough observers agree on. `seen` has the addresses at which each observer sees
    this node."""
    counts = Counter(ip for addrs in seen for ip in {ip_of(addr) for addr in addrs})
    needed = min(NUM_AGREEING, len(seen))
    return tuple(addr for addrs in seen for addr in addrs if counts[ip_of(addr)] >= needed)


def shows_symmetric_nat(seen: Sequence[Sequence[str]]) -> bool:
    """Return whether a NAT uses another port for each peer: at least three peers see this node at one IP, and no two of
    them at the same port. With two that differ, one may lie."""
    for ip in {ip_of(addr) for addrs in seen for addr in addrs}:
        named = [{addr for addr in addrs if ip_of(addr) == ip} for addrs in seen]
        counts = Counter(addr for addrs in named for addr in addrs)
        if sum(map(bool, named)) > NUM_AGREEING and max(counts.values()) < NUM_AGREEING:
            return True
    return False


def are_decided(answers: Sequence[Sequence[str]]) -> bool:
    """Return whether enough peers agree that they reached one address, or that they reached none."""
    counts = Counter(addr for addrs in answers for addr in set(addrs))
    return max(counts.values(), default=0) >= NUM_AGREEING or sum(not addrs for addrs in answers) >= NUM_AGREEING


def reached_addrs(answers: Sequence[Sequence[str]], candidates: Sequence[str]) -> tuple[str, ...]:
    """Return the candidates that enough peers have reached. `answers` has the addresses that each peer reached."""
    counts = Counter(addr for addrs in answers for addr in set(addrs))
    needed = min(NUM_AGREEING, len(answers))
    return tuple(addr for addr in candidates if answers and counts[addr] >= needed)
