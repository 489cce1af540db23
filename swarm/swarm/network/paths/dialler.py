"""Connects this node to a peer over the best available path: directly, by an introduction, or through a relay.

A daemon that holds any connection to a peer makes no other one, so the order matters. An address that a peer announces
is only a hint, and may be a stranger's, and so may the relay in it. `dial_policy` decides what is worth a dial. A liar
can also make peers up, any number of them at one machine, so addresses that others tell of peers are dialled only at a
bounded rate for each public IP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from swarm.network.ip_kinds import IpAddress, kind_of
from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.daemon_errors import WITHHELD
from swarm.network.libp2p.host import Connect, Host
from swarm.network.multiaddr import ip_of, is_private, is_relayed, relay_addr_of, relay_of
from swarm.network.paths.dial_policy import DialPolicy
from swarm.network.paths.introductions import Introductions
from swarm.network.peer_budgets import PeerRateLimit

LOCAL_S = 1.0
"""Time for a dial to private addresses alone. A peer in the same local network answers at once, and in another network
there is usually no answer."""

DIRECT_S = 3.0
"""Time for a dial to public addresses if there is another way to the peer: twice across the world, and a lost SYN. An
address that the peer has lost does not answer, and libp2p would wait longer than callers do."""

RELAYED_AGAIN_S = 0.4
"""Time for introductions to a peer whose lost connection led through a relay: three round trips across an ocean. Its
streams have already waited three seconds until their path was found dead, and if NATs allow no direct path, an
introduction takes all the time that it gets. `direct_paths.Upgrades` tries for longer."""

TOLD_S = 60.0
MAX_TOLD = 128
"""Maximum addresses at one public IP that are dialled in TOLD_S although their peer has not told them to this node:
two each of the peers of a cluster behind one IP. Otherwise, each liar near a key made each search for it dial 80
addresses of made-up peers, all at the machine that it names. Peers there that are known from others alone are not
dialled meanwhile."""

MAX_RELAYS = 2
"""Maximum relays of a peer that are asked for an introduction, one after the other."""

_NOWHERE = "no addresses"
"""The daemon's error for a peer of which it knows no address."""


def judged(connect: Connect, policy: DialPolicy) -> Connect:
    """Return a `connect` that dials only addresses worth a dial, and raises ControlError if there is none."""

    async def dial(peer_id: str, addrs: Sequence[str]) -> None:
        if not (worth := policy.worth_knowing(addrs)):
            raise ControlError(_NOWHERE)
        await connect(peer_id, worth)

    return dial


def ip4_first(addrs: Sequence[str]) -> list[Sequence[str]]:
    """Return `addrs` in groups to be dialled one after the other. If there are public addresses of both IP versions,
    the public IPv6 ones and the relayed ones form a second group.

    Only a peer that is connected by IPv4 can tell this node at which port its NAT is reached. IPv6 addresses are not
    rewritten on the way, so this node knows its own without help.
    """

    def is_public(addr: str, version: int) -> bool:
        ip = ip_of(addr)
        return ip is not None and ip.version == version and not is_private(addr) and not is_relayed(addr)

    last = [addr for addr in addrs if is_public(addr, 6) or is_relayed(addr)]
    first = [addr for addr in addrs if addr not in last]
    has_both = any(is_public(addr, 4) for addr in first) and any(is_public(addr, 6) for addr in last)
    return [first, last] if has_both else [addrs]


class Dialler:
    """Connects to peers. `policy` returns the present dial policy. `was_relayed(peer_id)` returns whether a peer was
    last connected through a relay, so that introductions get little time."""

    def __init__(
        self,
        host: Host,
        introductions: Introductions,
        policy: Callable[[], DialPolicy],
        was_relayed: Callable[[str], bool],
    ) -> None:
        self._host = host
        self._introductions = introductions
        self._policy = policy
        self._was_relayed = was_relayed
        self._told = PeerRateLimit[IpAddress](period_s=TOLD_S, per_peer=MAX_TOLD)

    async def connect(self, peer_id: str, addrs: Sequence[str]) -> None:
        """Connect to a peer by the best way that works. Raises ControlError with the failures of the last way that was
        tried, OSError or IncompleteReadError if the daemon cannot be asked to dial, and PeerUnreachable if it cannot be
        asked for its connections."""
        policy = self._policy()
        own = self._host.known_addrs(peer_id)
        worth = policy.worth_knowing(addrs)
        tried = [addr for addr in worth if addr in own or self._may_try(addr, policy)]
        direct = [addr for addr in tried if not is_relayed(addr)]
        relayed = [addr for addr in tried if is_relayed(addr)]
        failure = ControlError(WITHHELD if len(tried) < len(worth) else _NOWHERE)
        ways = ip4_first(direct) if direct else []
        for way in ways:
            try:
                async with asyncio.timeout(_patience_s(way) if relayed or way is not ways[-1] else None):
                    return await self._host.control.connect(peer_id, way)
            except ControlError as error:
                failure = error
            except TimeoutError:
                failure = ControlError("i/o timeout")
        with suppress(TimeoutError):
            async with asyncio.timeout(RELAYED_AGAIN_S if self._was_relayed(peer_id) else None):
                for relay, relay_addrs in _relays(relayed):
                    if await self._introductions.connect(peer_id, relay, relay_addrs):
                        return None
        if relayed:
            return await self._host.control.connect(peer_id, tuple(dict.fromkeys(map(policy.told_daemon, relayed))))
        raise failure

    def _may_try(self, addr: str, policy: DialPolicy) -> bool:
        """Return whether to dial an address that others have told, and count it."""
        ip = ip_of(addr)
        if ip is None or kind_of(ip) != "public" or policy.is_through_connected(addr):
            return True
        return self._told.takes(ip)


def _patience_s(direct: Sequence[str]) -> float:
    return LOCAL_S if all(map(is_private, direct)) else DIRECT_S


def _relays(relayed: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the relays through which addresses lead, each with its own addresses."""
    found: dict[str, list[str]] = {}
    for addr in relayed:
        found.setdefault(relay_of(addr), []).append(relay_addr_of(addr))
    return list(found.items())[:MAX_RELAYS]
