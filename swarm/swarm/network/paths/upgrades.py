"""Moves connections that began over a relay to a direct path, streams in use included.

A pair ends on a relay because an attempt failed, or because an address was not known yet. A daemon that holds a relayed
connection makes no other, so an attempt means to give that connection up: streams are resumed on the next one, which
costs them a pause of some seconds where there is still no direct path. So attempts are few, unless there is news: the
peer announces an address that was not tried, or an own address has changed. A peer that announces ever new ones is soon
not heeded any more. `run` is a task of the network.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarm_protocol.errors import PeerError

from swarm.network.libp2p.host import Host
from swarm.network.multiaddr import is_relayed

logger = logging.getLogger(__name__)

LOOK_S = 5.0

FIRST_S = 60.0
"""Time on a relay before the first attempt. An attempt of the same pair that failed has left NATs by then."""

MAX_S = 3600.0
GROWTH = 4.0
"""The pause to the next attempt is so many times as long, up to MAX_S."""

TURN_S = 20.0
"""Time by which the peer with the greater id is later, so that not both sides give the connection up at once."""

ATTEMPT_S = 15.0

MAX_AT_ONCE = 8
"""Attempts at the same time. Others wait for the next look."""

FORGET_S = 600.0
"""Time for which attempts are remembered of a peer that is not connected: leaving is no way to be tried anew."""

MAX_TRIED = 32
"""Addresses of a peer that are remembered as tried: four times what it can announce at once. Others are no news."""


@dataclass(slots=True)
class _Relayed:
    due_at: float
    pause_s: float
    tried: frozenset[str]  # direct addresses of the peer that attempts have known
    seen_at: float


class Upgrades:
    """Tries to replace relayed connections by direct ones, seldom, and sooner when there is news of addresses."""

    def __init__(
        self,
        host: Host,
        replace: Callable[[str], Awaitable[None]],
        may_be_introduced: Callable[[], bool],
    ) -> None:
        """`replace` gives a peer's connection up and reaches it anew. It raises PeerError if that leads nowhere. While
        this node can open no NAT, `may_be_introduced` returns False, and only new addresses are a reason to try."""
        self._host = host
        self._replace = replace
        self._may_be_introduced = may_be_introduced
        self._relayed: dict[str, _Relayed] = {}
        self._tried: set[str] = set()  # the peers of attempts that are under way

    def was_relayed(self, peer_id: str) -> bool:
        """Return whether a relay led to the peer when it was last seen, and no attempt to change that is under way."""
        return peer_id in self._relayed and peer_id not in self._tried

    def expect_news(self) -> None:
        """Try all peers soon: this node's addresses have changed."""
        now = asyncio.get_running_loop().time()
        for each in self._relayed.values():
            each.due_at, each.pause_s = now, FIRST_S

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            async with asyncio.TaskGroup() as attempts:
                for peer_id in self._due()[:MAX_AT_ONCE]:
                    attempts.create_task(self._try(peer_id))

    def _due(self) -> list[str]:
        """Look at the connections, and return the peers to try, with the one that has waited longest first."""
        now = asyncio.get_running_loop().time()
        kinds = self._host.path_kinds()
        known = {
            peer_id: each
            for peer_id, each in self._relayed.items()
            if peer_id not in kinds and each.seen_at > now - FORGET_S
        }
        relayed = [peer_id for peer_id, kind in kinds.items() if kind == "relayed"]
        for peer_id in relayed:
            turn_s = TURN_S if self._host.peer_id > peer_id else 0.0
            each = self._relayed.get(peer_id)
            known[peer_id] = each or _Relayed(now + FIRST_S + turn_s, FIRST_S, self._direct(peer_id), now)
            known[peer_id].seen_at = now
        self._relayed = known
        is_able = self._may_be_introduced()
        due = [
            peer_id
            for peer_id in relayed
            if (is_able and known[peer_id].due_at <= now) or self._has_news(peer_id, known[peer_id])
        ]
        return sorted(due, key=lambda peer_id: known[peer_id].due_at)

    def _has_news(self, peer_id: str, each: _Relayed) -> bool:
        return len(each.tried) < MAX_TRIED and not each.tried.issuperset(self._direct(peer_id))

    def _direct(self, peer_id: str) -> frozenset[str]:
        return frozenset(addr for addr in self._host.known_addrs(peer_id) if not is_relayed(addr))

    async def _try(self, peer_id: str) -> None:
        each = self._relayed[peer_id]
        if len(each.tried) < MAX_TRIED:
            each.tried |= self._direct(peer_id)
        each.pause_s = min(each.pause_s * GROWTH, MAX_S)
        each.due_at = asyncio.get_running_loop().time() + each.pause_s
        self._tried.add(peer_id)
        try:
            async with asyncio.timeout(ATTEMPT_S):
                await self._replace(peer_id)
        except (PeerError, TimeoutError) as error:
            logger.info("no direct path to %s instead of the relayed one: %s", peer_id, error)
        finally:
            self._tried.discard(peer_id)
