"""Bounds the peers that are connected to a node, and so the memory and the files that their connections take.

The daemon accepts every connection. Beyond its own bound, which is higher, it closes those with the fewest streams,
which spares strangers that hold streams open. Keys cost nothing, but addresses in many providers' networks do. So
beyond MAX_PEERS the networks that have most peers here give way, as in `peer_budgets`. `run` is a task of the network,
and owns all state.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from typing import NoReturn

from swarm_protocol.errors import PeerUnreachable

from swarm.network.libp2p.host import CONTROL_FAILURES, Host
from swarm.network.peer_budgets import ProviderOf

MAX_PEERS = 2048
"""Enough for a server with all its clients that is also a full relay. A connection without streams takes about 40 KiB
of the daemon's memory, and one open file."""

CHECK_S = 3.0

logger = logging.getLogger(__name__)


class ConnectionLimit:
    def __init__(self, host: Host, used_peers: Callable[[], Set[str]]) -> None:
        self._host = host
        self._used_peers = used_peers

    async def run(self) -> NoReturn:
        known: dict[str, None] = {}  # the connected peers, the oldest first
        was_full = False
        while True:
            await asyncio.sleep(CHECK_S)
            with suppress(PeerUnreachable):  # if the daemon has ended, the unary connection reports it
                connected = await self._host.look()
                known = dict.fromkeys((*(peer_id for peer_id in known if peer_id in connected), *connected))
                closed = surplus(known, self._used_peers(), self._host.provider_of)
                if closed and not was_full:
                    logger.warning("%d peers are connected: closing connections to %d", len(known), len(closed))
                was_full = bool(closed)
                for peer_id in closed:
                    with suppress(*CONTROL_FAILURES):
                        await self._host.control.disconnect(peer_id)


def surplus(connected: Iterable[str], used: Set[str], provider_of: ProviderOf, max_peers: int = MAX_PEERS) -> list[str]:
    """Return which of the `connected` peers, oldest first, have to go: those beyond one number for each provider's
    network, which is at least 1, the newest first, and those `used` last."""
    by_provider: dict[object, list[str]] = {}
    for peer_id in sorted(connected, key=lambda peer_id: peer_id not in used):
        by_provider.setdefault(provider_of(peer_id), []).append(peer_id)
    sizes = [len(peers) for peers in by_provider.values()]
    share = bisect_right(range(max_peers), max_peers, key=lambda each: sum(min(size, each + 1) for size in sizes))
    return [peer_id for peers in by_provider.values() for peer_id in peers[max(1, share) :]]
