"""What a session has of the blocks that its own process runs: the spans at both ends of the model.

Servers then run the blocks between. They get hidden states in place of tokens and give hidden states back, as servers
in the middle of any chain do, and are told nothing of how tokens are drawn. `swarm.serving.home` runs the spans, and
`swarm.client.text_at_home` decides for which models.
"""

from __future__ import annotations

from typing import Protocol

from swarm.router.routing import Hop, NoChain
from swarm.serving.session.connection_pool import ConnectionPool
from swarm.serving.session.peer_health import PeerHealth


class HomeSpans(Protocol):
    """The two spans of one model that this process runs.

    `hops` are the first and the last, under peer ids that are no peer's; `connections` lead to them. `prefix_key` is
    this client's secret: the names of pages that servers keep are made with it, so that they tell no tokens.
    """

    @property
    def hops(self) -> tuple[Hop, Hop]: ...

    @property
    def connections(self) -> ConnectionPool: ...

    @property
    def prefix_key(self) -> bytes: ...


class ChainFinder(Protocol):
    """What finds the hops of a span for a session."""

    async def find(self, start: int, end: int, between: tuple[str, str], *, since_s: float | None) -> list[Hop]:
        """Return hops over `[start, end)` between two peers ("": none). Raises NoChain."""


class HomeChainFinder:
    """Put the spans at home before and after the chain that `finder` finds over the blocks between them."""

    def __init__(self, home: HomeSpans, finder: ChainFinder, health: PeerHealth, *, max_tokens: int) -> None:
        self._home = home
        self._finder = finder
        self._health = health
        self._max_tokens = max_tokens

    async def find(self, start: int, end: int, between: tuple[str, str], *, since_s: float | None) -> list[Hop]:
        first, last = self._home.hops
        own = [hop for hop in (first, last) if start <= hop.start and hop.end <= end]
        if any(hop.peer_id in self._health.full(self._max_tokens) for hop in own):
            raise NoChain(
                f"this process has no room for another session of {self._max_tokens} tokens on its own blocks",
                remedy="try again in a moment, or ask for fewer tokens",
                missing=((start, end),),
            )
        start, end = max(start, first.end), min(end, last.start)
        at_home = {first.peer_id, last.peer_id}
        before, after = ("" if peer_id in at_home else peer_id for peer_id in between)
        middle = await self._finder.find(start, end, (before, after), since_s=since_s) if start < end else []
        return sorted([*own, *middle], key=lambda hop: hop.start)
