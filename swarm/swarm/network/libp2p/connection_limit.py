"""Bounds the peers that are connected to a node, and the memory and the files that their connections take.

The daemon accepts every connection. Beyond its own bound, which is higher, it closes those with the fewest streams,
which spares strangers that hold streams open. Keys cost nothing, but addresses in many providers' networks do. So
beyond MAX_PEERS the networks that have most peers here give way, as in `peer_budgets`.

A stranger can begin requests without end, which wait in the daemon, where this process sees neither them nor whose they
are. Only the end of their connection ends them. So once the daemon takes too much memory, the connections that are not
in use are closed, and all if that does not help. Peers connect again, and their streams go on.

`run` is a task of the network, and owns all state.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Set
from contextlib import suppress
from itertools import filterfalse
from typing import NoReturn

from swarm_protocol.errors import PeerUnreachable

from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES
from swarm.network.libp2p.host import Connections, Host
from swarm.network.libp2p.p2pd_process import max_memory_bytes
from swarm.network.peer_budgets import ProviderOf

MAX_PEERS = 2048
"""Enough for a server with all its clients that is also a full relay. A connection without streams takes about 40 KiB
of the daemon's memory, and one open file."""

MAX_PEER_CONNECTIONS = 4
"""Beyond MAX_PEERS connections all peers with more than these give way, since one key can open thousands. Peers usually
have one, and two after both sides dialled at once, or where a direct path was found beside a relay's."""

CHECK_S = 3.0

logger = logging.getLogger(__name__)


class ConnectionLimit:
    def __init__(self, host: Host, used_peers: Callable[[], Set[str]]) -> None:
        self._host = host
        self._used_peers = used_peers
        self._max_bytes = max_memory_bytes()  # as at the daemon's start: reading the limits takes two milliseconds
        self._num_heavy = 0  # successive checks at which the daemon took too much memory

    async def run(self) -> NoReturn:
        known: Connections = {}  # the oldest first
        has_warned = False  # once: nodes dial a seed again that has closed their connection
        while True:
            await asyncio.sleep(CHECK_S)
            with suppress(PeerUnreachable):  # if the daemon has ended, the unary connection reports it
                connected = await self._host.look()
                known = {each: connected[each] for each in (*filter(connected.__contains__, known), *connected)}
                closed = surplus(known, self._used(), self._host.provider_of)
                if closed and not has_warned:
                    logger.warning("%d peers are connected: closing the connections to %d", len(known), len(closed))
                has_warned = has_warned or bool(closed)
                for peer_id in {*closed, *self._weights(known)}:
                    with suppress(*CONTROL_FAILURES):
                        await self._host.control.disconnect(peer_id)

    def _weights(self, known: Connections) -> list[str]:
        """Return the peers that have to go while the daemon takes too much memory: those that are not in use, at the
        next check all, and none at the two after it, in which the daemon gives memory back."""
        num_bytes = self._host.daemon.memory_bytes()
        self._num_heavy = self._num_heavy + 1 if num_bytes > self._max_bytes else 0
        unused = list(filterfalse(self._used(), known)) if self._num_heavy % 4 == 1 else []
        closed = list(known) if self._num_heavy % 4 == 2 else unused
        if closed:
            logger.warning(
                "the libp2p daemon takes %d MiB: closing the connections to %d peers", num_bytes >> 20, len(closed)
            )
        return closed

    def _used(self) -> Callable[[str], bool]:
        used_peers = self._used_peers()
        return lambda peer_id: peer_id in used_peers or self._host.num_calls(peer_id) > 0


def surplus(
    connected: Connections, is_used: Callable[[str], bool], provider_of: ProviderOf, max_peers: int = MAX_PEERS
) -> list[str]:
    """Return which of the `connected` peers, oldest first, have to go if there are more than `max_peers` connections:
    those with more than MAX_PEER_CONNECTIONS, and of each provider's network those beyond one number, which is at least
    1, the newest first, and those in use last."""
    if sum(map(len, connected.values())) <= max_peers:
        return []
    greedy = [peer_id for peer_id, addrs in connected.items() if len(addrs) > MAX_PEER_CONNECTIONS]
    others = (peer_id for peer_id, addrs in connected.items() if len(addrs) <= MAX_PEER_CONNECTIONS)
    by_provider: dict[object, list[str]] = {}
    for peer_id in sorted(others, key=lambda peer_id: not is_used(peer_id)):
        by_provider.setdefault(provider_of(peer_id), []).append(peer_id)
    sizes = [len(peers) for peers in by_provider.values()]
    share = bisect_right(range(max_peers), max_peers, key=lambda each: sum(min(size, each + 1) for size in sizes))
    return greedy + [peer_id for peers in by_provider.values() for peer_id in peers[max(1, share) :]]
