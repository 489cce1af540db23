"""Finds the servers of a model for a session, and looks them up again if the known ones do not suffice.

`swarm.router.routing` chooses the chain, and the session decides what to do with it. The module owns no tasks.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from swarm_protocol.errors import PeerTimeout
from swarm_protocol.records import ServeRecord

from swarm.router.revisions import manifest_of, with_other_revisions
from swarm.router.routing import Hop, NeverRoom, NoChain, NoRoom, RoutingContext, Spans, find_chain
from swarm.serving.model.shape import ModelShape
from swarm.serving.session.connection_pool import ConnectionPool
from swarm.serving.session.peer_health import REST_S, PeerHealth

if TYPE_CHECKING:
    from swarm.serving.session.client_state import SessionOptions
    from swarm.serving.session.session_messages import SessionMessages

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Pause between two searches for a server that could take over, or that has room."""

LOOK_UP_S = 5.0
"""Seconds between a session's lookups of servers while the known ones have no room."""

MAX_LEFT_EARLY = 2
"""Servers that one session leaves early because others have their blocks: if all are slow to dial, it waits for one."""

MAX_OTHERS = 3
"""Servers that are asked whether this client's own line works."""


class KnownServers:
    """The known servers of one revision of a model, by peer id. The caller passes the initial ones."""

    def __init__(self, health: PeerHealth, servers: Mapping[str, ServeRecord], model: ModelShape) -> None:
        self.servers = servers
        self.model = model
        self._others: Mapping[str, ServeRecord] = {}
        self.health = health
        # all announce the same manifest, or none
        self._manifest = next((manifest_of(record) for record in servers.values()), b"")

    async def look_up(self) -> None:
        """Look the servers up again. Keep the known ones if nobody answers."""
        try:
            servers = await self.health.servers(self.model.name)
        except PeerTimeout as error:
            logger.info("looking up servers of %s: %s", self.model.name, error)
            return
        self.servers = {
            peer_id: record
            for peer_id, record in servers.items()
            if record.revision == self.model.revision and manifest_of(record) == self._manifest
        }
        self._others = {
            peer_id: record for peer_id, record in servers.items() if record.revision != self.model.revision
        }

    def peers_of(self, *spans: tuple[int, int]) -> set[str]:
        """Return the servers of any of the blocks of these spans, with those that still load them."""
        return {
            peer_id
            for peer_id, record in self.servers.items()
            if record.state != "draining" and any(record.start < end and start < record.end for start, end in spans)
        }

    def each_has_one_of(self, missing: Sequence[tuple[int, int]], peers: Set[str]) -> bool:
        """Return whether each of the `missing` spans has a server among `peers`."""
        return all(self.peers_of(span) & peers for span in missing)

    def find_chain(self, start: int, end: int, context: RoutingContext, *, without_last: str = "") -> list[Hop]:
        """Return the cheapest chain over `[start, end)`, in which the server `without_last` does not run the model's
        last block. Raises NoChain, which names other revisions that are served."""
        servers, last = dict(self.servers), self.model.num_blocks - 1
        if without_last in servers:
            record = servers.pop(without_last)
            if record.start < last:
                servers[without_last] = replace(record, end=min(record.end, last))
        try:
            return list(find_chain(servers, start, end, context).hops)
        except NoChain as error:
            raise with_other_revisions(error, self.model.revision, self._others) from None


class LocalSpans(Protocol):
    """The two spans of one model that this process runs.

    `hops` are the first and the last span, under peer ids that belong to no peer; `connections` lead to them.
    `prefix_key` is this client's secret: page keys are derived from it, so that servers cannot guess tokens from them.
    """

    hops: tuple[Hop, Hop]
    connections: ConnectionPool
    prefix_key: bytes


class RouteFinder:
    """Finds chains with room for the session of `messages`, and gives up `options.patience_s` after a server was lost.

    The local spans come before and after the servers that are found for the blocks between them.
    """

    def __init__(self, known: KnownServers, messages: SessionMessages, options: SessionOptions) -> None:
        self._known = known
        self._health = known.health
        self._messages = messages
        self._patience_s = options.patience_s
        self._local = options.local_spans.hops if options.local_spans is not None else ()
        self._left_out = ""  # runs any block but the last
        self._began_s = math.inf
        self._looked_up_s = -math.inf
        self._num_left_early = 0

    async def find(self, start: int, end: int, between: tuple[str, str], *, since_s: float | None) -> list[Hop]:
        """Return the cheapest chain over `[start, end)`. `between` are the peers before and after it, "" for none.

        The search ends `patience_s` after `since_s`, or if all servers of some blocks have said that they never have
        room for the session. Servers to avoid are used if there are no others. If `since_s` is None, the time counts
        from the session's first search, and two tries are enough, unless the servers have no room now, or are not asked
        for a moment since they failed just before it.
        Raises NoChain, and its subclass NeverRoom if it was in vain.
        """
        own = [hop for hop in self._local if start <= hop.start and hop.end <= end]
        num_tokens, has_grammar = self._messages.room_tokens, self._messages.has_grammar
        if any(hop.peer_id in self._health.full(num_tokens, has_grammar=has_grammar) for hop in own):
            raise NoRoom(
                f"this process has no room for another session of {num_tokens} tokens on its own blocks",
                remedy="try again in a moment, or ask for fewer tokens",
                missing=((start, end),),
            )
        if self._local:
            first, last = self._local
            start, end = max(start, first.end), min(end, last.start)
        servers = await self._find_servers(start, end, between, since_s) if start < end else []
        return sorted([*own, *servers], key=lambda hop: hop.start)

    async def find_others(self, hop: Hop, between: tuple[str, str]) -> list[Hop]:
        """Return the cheapest chain over the blocks of `hop` without its server and servers to avoid, by the servers'
        newest records. Raises NoChain."""
        await self._known.look_up()
        return self._find_others(hop, hop.peer_id, between)

    def leaves_early(self, hop: Hop) -> bool:
        """Return whether the session gives up a server that is slow to dial, since others can have its blocks now."""
        if self._num_left_early == MAX_LEFT_EARLY or not self._have_others(hop, hop.peer_id):
            return False
        self._num_left_early += 1
        return True

    def others(self, peers: Set[str]) -> list[str]:
        """Return a few servers of the model beside these peers."""
        failing = self._health.avoid
        return [each for each in self._known.servers if each not in peers and each not in failing][:MAX_OTHERS]

    def leave_out(self, hop: Hop) -> bool:
        """Have the last block on another server than this one, which cannot follow the session's grammar, if it is the
        first such server, and others can have that block now. Return whether that is so."""
        if self._left_out:
            return False
        self._left_out = hop.peer_id
        if not self._have_others(hop, ""):
            self._left_out = ""
        return self._left_out != ""

    def _have_others(self, hop: Hop, barred: str) -> bool:
        try:
            self._find_others(hop, barred)
        except NoChain:
            return False
        return True

    def _find_others(self, hop: Hop, barred: str, between: tuple[str, str] = ("", "")) -> list[Hop]:
        context = self._context(between)
        context = replace(context, barred={barred, *context.barred, *context.avoid})
        return self._known.find_chain(hop.start, hop.end, context, without_last=self._left_out)

    async def _find_servers(self, start: int, end: int, between: tuple[str, str], since_s: float | None) -> list[Hop]:
        clock = asyncio.get_running_loop().time
        self._began_s = min(self._began_s, clock())
        began_s = self._began_s if since_s is None else since_s
        has_looked_up = False
        while True:
            is_over = clock() >= began_s + self._patience_s
            num_tokens, cached_tokens = self._messages.cached_tokens()
            context = self._context(between, is_last=is_over)
            barred = set(context.barred)
            if since_s is None:  # two tries are enough, however short a server rests
                barred |= self._health.failed_since(max(self._began_s, clock() - REST_S))
            context = replace(context, num_prompt_tokens=num_tokens, cached_tokens=cached_tokens, barred=barred)
            try:
                return self._known.find_chain(start, end, context, without_last=self._left_out)
            except NoChain as error:
                lacks_room, resting = isinstance(error, NoRoom), self._health.resting(self._began_s)
                may_wait = since_s is not None or lacks_room or self._known.each_has_one_of(error.missing, resting)
                # the servers known at the start of the session may be outdated
                is_known = has_looked_up or (lacks_room and clock() < self._looked_up_s + LOOK_UP_S)
                in_vain = self._spans_in_vain(error)
                if is_known and (is_over or not may_wait or in_vain):
                    if lacks_room and in_vain:
                        error = NeverRoom(error.message, remedy=error.remedy, missing=in_vain)
                    raise (error if since_s is None else error.after_waiting(clock() - since_s)) from None
                peers = self._known.servers if lacks_room else ()
                # a server that may be asked again need not wait for a lookup
                async with self._health.until_rested(self._known.peers_of(*error.missing) if may_wait else ()):
                    await self._health.wait_for_server(peers, began_s, within_s=RETRY_S if is_known else 0)
                    if not lacks_room or clock() >= self._looked_up_s + LOOK_UP_S:
                        await self._known.look_up()
                        self._looked_up_s, has_looked_up = clock(), True

    def _context(self, between: tuple[str, str], *, is_last: bool = False) -> RoutingContext:
        own = {hop.peer_id for hop in self._local}
        before, after = ("" if peer_id in own else peer_id for peer_id in between)
        return self._health.routing_context(
            self._known.servers,
            self._messages.room_tokens,
            self._messages.session_id,
            between=(before, after),
            has_grammar=self._messages.has_grammar,
            is_last=is_last,
        )

    def _spans_in_vain(self, error: NoChain) -> Spans:
        """Return the missing spans of which no server can ever have room for the session."""
        full = self._health.full(self._messages.room_tokens, for_good=True)
        found = ((span, self._known.peers_of(span)) for span in error.missing)
        return tuple(span for span, peers in found if peers and peers <= full)
