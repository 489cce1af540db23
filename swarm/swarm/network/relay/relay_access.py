"""Decides which peers may use this node's relay, and shares its rate among them.

`NetworkPeers` distinguishes peers of this node's network from strangers, by greeting them over their connection. It
dials no peer. A peer's answer is remembered for a while, for a bounded number of peers, so that a peer is not greeted
at each request. Any host that knows the network's name can claim to be of the network. This keeps out hosts that look
for a free relay, but not attackers.

`RelayBudget` limits the bytes a second of the whole relay, and gives each peer a fair share. A token bucket (`rate`)
limits the total. Pieces that must wait are served by start-time fair queueing (Goyal, Vin and Cheng 1996) over peers:
each peer has a virtual time, which is the number of bytes it was served, and the piece with the least virtual time of
its ends goes first. Deviation: a piece is charged to both its ends, so that a peer does not get more with more
circuits, no matter which side opened them. A peer that is alone may take everything, and a peer that was silent has
saved up nothing.

State belongs to the network's loop; one timer runs while a piece waits. The number of circuits bounds what is held.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from swarm_protocol.errors import PeerError

from swarm.network.rate import Rate
from swarm.newest_items import NewestItems

GREETING_TIMEOUT_S = 3.0
"""Time for a peer to answer a greeting. A peer that dials through this node waits 5 s in all."""

NETWORK_PEER_S = 600.0
STRANGER_S = 10.0
"""Time for which a peer counts as one of the network, or as a stranger, after a greeting. It is short for strangers,
since a node that was too busy to answer may try again."""

MAX_KNOWN = 1024


class NetworkPeers:
    """Remembers which peers are of this node's network, and greets unknown ones."""

    def __init__(self, greet: Callable[[str], Awaitable[object]], *, kept_s: float = NETWORK_PEER_S) -> None:
        """`greet(peer_id)` raises PeerError unless the peer is of this network and protocol version. It is called again
        for a peer that has been of the network for `kept_s`."""
        self._greet = greet
        self._kept_s = kept_s
        self._known = NewestItems[str, tuple[bool, float]](MAX_KNOWN)  # the finding, and until when it counts
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def include(self, peer_id: str) -> bool:
        """Return whether the peer says in time that it is of this network."""
        now_s = asyncio.get_running_loop().time
        async with self._locks.setdefault(peer_id, asyncio.Lock()):
            is_of_network, until = self._known.get(peer_id, (False, -math.inf))
            if until <= now_s():
                is_of_network = await self._says_so(peer_id)
                self._known[peer_id] = is_of_network, now_s() + (self._kept_s if is_of_network else STRANGER_S)
            return is_of_network

    async def _says_so(self, peer_id: str) -> bool:
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                await self._greet(peer_id)
        except (PeerError, TimeoutError):
            return False
        return True


MAX_PIECE_BYTES = 2**18
MIN_PIECE_BYTES = 2**12
PIECE_S = 0.02
"""Time that one piece takes at the full rate, within these bounds, and so the time for which another message waits
behind it."""

BURST_S = 0.1
"""Unused time that the rate makes up for."""

MAX_SERVED = 1024
"""Maximum peers whose virtual time is kept: twice the maximum number of peers with circuits. Beyond it all virtual
times are reset."""

Ends = tuple[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    ends: Ends
    num_bytes: int
    may_pass: asyncio.Future[None]


class RelayBudget:
    """Shares a number of bytes a second fairly among the peers that a relay carries bytes for."""

    def __init__(self, bytes_per_s: float = math.inf, charge: Callable[[int], None] = lambda _num_bytes: None) -> None:
        """An infinite `bytes_per_s` means no limit. `charge` is called with the number of bytes of each piece that
        passes."""
        self._rate = Rate(bytes_per_s, burst_s=BURST_S)
        self._charge = charge
        self._now_serving = 0.0  # the virtual time of the piece that passed last
        self._served: dict[str, float] = {}  # the virtual times of peers since the last time when no piece waited
        self._waiting: list[_Piece] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def piece_bytes(self) -> int:
        """The maximum bytes of one piece."""
        return int(min(MAX_PIECE_BYTES, max(MIN_PIECE_BYTES, self._rate.bytes_per_s * PIECE_S)))

    async def take(self, ends: Ends, num_bytes: int) -> float:
        """Wait until `num_bytes` between two peers may pass, and return the seconds waited."""
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
"""A budget without a limit, which all circuits outside a relay share."""
