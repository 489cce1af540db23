"""Connects this node to a peer over the best path that there is: directly, by an introduction, or through a relay.

A daemon that holds any connection to a peer makes no other one, and so the order matters. What a peer announces is a
hint, and may be anybody's address, and so may the relay in it: `dial_policy` says what is worth a dial.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.host import Connect, Host
from swarm.network.multiaddr import ip_of, is_private, is_relayed, relay_addr_of, relay_of
from swarm.network.paths.dial_policy import DialPolicy
from swarm.network.paths.introductions import Introductions

LOCAL_S = 1.0
"""Time for a dial to private addresses alone: a peer in the same local network answers at once, and in another network
nobody does."""

DIRECT_S = 3.0
"""Time for a dial to public addresses of a peer that can be reached in another way as well: twice across the world, and
a SYN that was lost. An address that the peer has lost does not answer, and libp2p would wait for longer than callers
do."""

RELAYED_AGAIN_S = 0.4
"""Time for introductions to a peer that only a relay led to until its connection was lost: three round trips across an
ocean. Streams have waited for three seconds until it was clear that their path is dead, and where NATs allow no direct
one an attempt takes its whole time. `direct_paths.Upgrades` tries for longer."""

MAX_RELAYS = 2
"""Relays of a peer that are asked for an introduction, one after the other."""

_NOWHERE = "no addresses"
"""Holds what the daemon says of a peer of which it knows no address."""


def judged(connect: Connect, policy: DialPolicy) -> Connect:
    """Return `connect` for addresses that came from peers: it raises ControlError if none of them is worth a dial."""

    async def dial(peer_id: str, addrs: Sequence[str]) -> None:
        if not (worth := policy.worth_knowing(addrs)):
            raise ControlError(_NOWHERE)
        await connect(peer_id, worth)

    return dial


def ip4_first(addrs: Sequence[str]) -> list[Sequence[str]]:
    """Return `addrs` in the order in which they are dialled: of a peer with public ones of both IP versions, the public
    ones of IPv6 and those through relays after all others.

    Only a peer that is connected by IPv4 can tell this node at which port its NAT is reached. Addresses of IPv6 are
    not rewritten on the way, and so known without anybody's help.
    """

    def is_public(addr: str, version: int) -> bool:
        ip = ip_of(addr)
        return ip is not None and ip.version == version and not is_private(addr) and not is_relayed(addr)

    last = [addr for addr in addrs if is_public(addr, 6) or is_relayed(addr)]
    first = [addr for addr in addrs if addr not in last]
    has_both = any(is_public(addr, 4) for addr in first) and any(is_public(addr, 6) for addr in last)
    return [first, last] if has_both else [addrs]


class Dialler:
    """Connects to peers. `policy` returns what holds now; `was_relayed(peer_id)` whether a relay alone has led to a
    peer lately, so that a direct path need not be waited for."""

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

    async def connect(self, peer_id: str, addrs: Sequence[str]) -> None:
        """Connect to a peer by the best way that works. Raises ControlError with the failures of the last way that was
        tried, OSError or IncompleteReadError if the daemon cannot be asked, and PeerUnreachable if its connections
        cannot be."""
        policy = self._policy()
        worth = policy.worth_knowing(addrs)
        direct = [addr for addr in worth if not is_relayed(addr)]
        relayed = [addr for addr in worth if is_relayed(addr)]
        failure = ControlError(_NOWHERE)
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


def _patience_s(direct: Sequence[str]) -> float:
    return LOCAL_S if all(map(is_private, direct)) else DIRECT_S


def _relays(relayed: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the relays that addresses lead through, with what leads to each relay."""
    found: dict[str, list[str]] = {}
    for addr in relayed:
        found.setdefault(relay_of(addr), []).append(relay_addr_of(addr))
    return list(found.items())[:MAX_RELAYS]
