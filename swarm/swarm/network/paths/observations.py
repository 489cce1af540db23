"""Decides which of its own addresses a node believes, from the answers of peers that see it or have dialled it. Pure.

Some peer may lie. `address_survey` asks the peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from swarm.network.ip_kinds import IpAddress, local_network_of, provider_network_of
from swarm.network.multiaddr import ip_of

IP_VERSIONS = (4, 6)

NUM_AGREEING = 2
"""Peers that must agree, if at least that many have answered."""


def of_version(version: int, addrs: Sequence[str]) -> tuple[str, ...]:
    """Return those of `addrs` that have an IP address of this version."""
    return tuple(addr for addr in addrs if (ip := ip_of(addr)) is not None and ip.version == version)


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
