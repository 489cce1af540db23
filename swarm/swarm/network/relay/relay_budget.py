"""The bytes a second that a relay carries in all, and the fair share of each peer in them.

A token bucket (`rate`) gives the total. Pieces that must wait are served by start-time fair queueing (Goyal, Vin and
Cheng 1996) over peers: each peer has a virtual time, which is how many bytes it was served, and the piece whose ends
are behind goes first. Deviation: a piece is charged to both its ends, so that a peer does not get more with more
circuits, no matter which side opened them. A peer that is alone may take everything, and one that was silent has
saved up nothing.

State belongs to the network's loop; one timer runs while somebody waits. What it holds is bounded by the circuits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from swarm.network.rate import Rate

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
