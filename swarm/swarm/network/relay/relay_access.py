"""Decides who may use this node's relay, and how much of it.

`NetworkPeers` tells peers of this node's network from strangers, by greeting them over the connection that they have.
Nobody is dialled for it, and a peer is asked once, however often it comes: what it answered is kept for a while, for a
bounded number of peers. A peer can claim to be of the network, of which it only has to know the name; this keeps out
hosts that look for a free relay, not enemies.

`RelayBudget` has the bytes a second that the relay carries in all, and the fair share of each peer in them. A token
bucket (`rate`) gives the total. Pieces that must wait are served by start-time fair queueing (Goyal, Vin and Cheng
1996) over peers: each peer has a virtual time, which is how many bytes it was served, and the piece whose ends are
behind goes first. Deviation: a piece is charged to both its ends, so that a peer does not get more with more circuits,
no matter which side opened them. A peer that is alone may take everything, and one that was silent has saved up
nothing.

State belongs to the network's loop; one timer runs while somebody waits. What it holds is bounded by the circuits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from swarm_protocol.errors import PeerError

from swarm.network.rate import Rate
from swarm.newest_items import NewestItems

GREETING_TIMEOUT_S = 3.0
"""Time for a peer to say who it is. A peer that dials through this node waits 5 s in all."""

NETWORK_PEER_S = 600.0
STRANGER_S = 10.0
"""Time for which an answer holds, or that there was none. A node that was too busy to answer may come again soon."""

MAX_KNOWN = 1024


@dataclass(frozen=True, slots=True)
class _Finding:
    is_of_network: bool
    until: float


class KnowsNetworkPeers(Protocol):
    """Tells peers of the network from strangers: `NetworkPeers`, or the gate of a private network."""

    async def include(self, peer_id: str) -> bool: ...


class NetworkPeers:
    """Remembers which peers are of this node's network, and greets those that it does not know."""

    def __init__(self, greet: Callable[[str], Awaitable[object]]) -> None:
        """`greet(peer_id)` raises PeerError unless the peer is of this network and protocol version."""
        self._greet = greet
        self._known = NewestItems[str, _Finding](MAX_KNOWN)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def include(self, peer_id: str) -> bool:
        """Return whether the peer is of this network, as far as it says so in time."""
        if (found := self._found(peer_id)) is not None:
            return found
        async with self._locks.setdefault(peer_id, asyncio.Lock()):
            if (found := self._found(peer_id)) is not None:
                return found
            is_of_network = await self._says_so(peer_id)
            self._remember(peer_id, is_of_network)
            return is_of_network

    def forget(self, peer_id: str) -> None:
        """Ask a peer anew when it comes next."""
        self._known.pop(peer_id, None)

    def _found(self, peer_id: str) -> bool | None:
        finding = self._known.get(peer_id)
        if finding is None or finding.until <= asyncio.get_running_loop().time():
            return None
        return finding.is_of_network

    async def _says_so(self, peer_id: str) -> bool:
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                await self._greet(peer_id)
        except (PeerError, TimeoutError):
            return False
        return True

    def _remember(self, peer_id: str, is_of_network: bool) -> None:
        hold_s = NETWORK_PEER_S if is_of_network else STRANGER_S
        self._known[peer_id] = _Finding(is_of_network, asyncio.get_running_loop().time() + hold_s)


MAX_PIECE_BYTES = 2**18
MIN_PIECE_BYTES = 2**12
PIECE_S = 0.02
"""Time that one piece takes at the full rate, within these bounds: how long a short message waits behind another."""

BURST_S = 0.1
"""Unused time that the rate makes up for."""

MAX_SERVED = 1024
"""Peers whose virtual time is known, twice as many as have circuits. Beyond them all are forgotten, and begin anew."""

Ends = tuple[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    ends: Ends
    num_bytes: int
    may_pass: asyncio.Future[None]


class RelayBudget:
    """Shares a number of bytes a second fairly among the peers that a relay carries bytes for."""

    def __init__(self, bytes_per_s: float = math.inf, charge: Callable[[int], None] = lambda _num_bytes: None) -> None:
        """Infinite: no limit. `charge` is told of all bytes that pass."""
        self._rate = Rate(bytes_per_s, burst_s=BURST_S)
        self._charge = charge
        self._now_serving = 0.0  # the virtual time of the piece that passed last
        self._served: dict[str, float] = {}  # the virtual times of peers since somebody had to wait
        self._waiting: list[_Piece] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def piece_bytes(self) -> int:
        """Amount that is asked for at once."""
        return int(min(MAX_PIECE_BYTES, max(MIN_PIECE_BYTES, self._rate.bytes_per_s * PIECE_S)))

    async def take(self, ends: Ends, num_bytes: int) -> float:
        """Wait until `num_bytes` between two peers may pass, and return for how many seconds that was."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        if not self._waiting and not self._rate.wait_s(began_at):
            self._served.clear()
            self._pass(ends, num_bytes, began_at)
            return 0.0
        piece = _Piece(ends, num_bytes, loop.create_future())
        self._waiting.append(piece)
        if self._timer is None:
            self._timer = loop.call_later(self._rate.wait_s(began_at), self._serve)
        try:
            await piece.may_pass
        finally:
            if piece in self._waiting:
                self._waiting.remove(piece)
        return loop.time() - began_at

    def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._waiting and not self._rate.wait_s(now):
            piece = min(self._waiting, key=lambda piece: self._start(piece.ends))
            self._waiting.remove(piece)
            if not piece.may_pass.done():
                self._pass(piece.ends, piece.num_bytes, now)
                piece.may_pass.set_result(None)
        self._timer = loop.call_later(self._rate.wait_s(now), self._serve) if self._waiting else None

    def _start(self, ends: Ends) -> float:
        """Return the virtual time at which a piece between two peers may pass."""
        return max(self._now_serving, *(self._served.get(peer_id, 0.0) for peer_id in ends))

    def _pass(self, ends: Ends, num_bytes: int, now: float) -> None:
        self._rate.reserve(num_bytes, now)
        self._charge(num_bytes)
        self._now_serving = self._start(ends)
        if len(self._served) >= MAX_SERVED:
            self._served.clear()
        self._served.update(dict.fromkeys(ends, self._now_serving + num_bytes))


NO_LIMIT = RelayBudget()
"""A budget in which nobody waits, so that everything without a limit may share it."""
