"""Places a span on this node: decides which blocks to take, serves them, and moves if that helps enough.

`router.placement` decides; this module measures, publishes proposals, waits until others see them, and acts. One task,
started by `start` and ended by `close`, measures links and watches for a better span. Failures in it are logged,
counted and tried again; if a defect ends it, `failure` says so.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, PeerTimeout, SessionError, SwarmError
from swarm_protocol.records import ServeRecord

from swarm.ended_tasks import end_tasks
from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.router.placement import (
    Capacity,
    PlacementDecision,
    choose_move,
    choose_span,
    proposed_span,
    sole_spans,
    turn_hash,
    work_ms,
)
from swarm.router.routing import format_spans
from swarm.serving.model.model_files import open_model
from swarm.serving.server.capability import (
    NUM_COPIES,
    SpanCapability,
    VolunteerOptions,
    hidden_ms,
    measure_capability,
    options_for,
)
from swarm.serving.server.deployment import ServerOptions
from swarm.serving.server.span_server import SpanServer
from swarm.threads import in_own_thread

logger = logging.getLogger(__name__)

SETTLE_S = 3.0
"""Seconds between a proposal and the decision: over twice the time that a record takes to reach all nodes. A node that
arrives later finds this one settled, and chooses around it."""

WATCH_S = 20.0
"""Minimum seconds between searches for a better span. They are up to twice as long, so that not all nodes move at
once."""

MOVE_WITHIN_S = 30.0
"""Seconds for sessions on the old span to move to other servers."""

MIN_TOKENS_PER_S = 0.5
"""Minimum tokens per second that the upload must allow: a slower server would only hold up its users."""

MIN_TOKEN_MS = 0.1
"""Minimum time of a token on a link that is announced: a shorter time makes no difference."""

LINKS_WITHIN_S = 2.0
"""Seconds for measuring links before the first decision and at each search; slower links are measured the next time."""


class SpanPlacer:
    """Chooses, serves and moves a span. `on_choice` is called with the first span before its weights are loaded.
    `on_decision` is called with the first span and with each later one, once it is served."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        model_dir: Path,
        *,
        name: str,
        options: VolunteerOptions,
        on_choice: Callable[[PlacementDecision], None] = lambda _decision: None,
        on_decision: Callable[[PlacementDecision], None] = lambda _decision: None,
    ) -> None:
        self.server: SpanServer | None = None
        self.num_failed_moves = 0
        self._network = network
        self._membership = membership
        self._model_dir = model_dir
        self._name = name
        self._options = options
        self._on_choice = on_choice
        self._on_decision = on_decision
        self._watch: asyncio.Task[None] | None = None
        self._failure: SessionError | None = None
        self._hidden_size = 0

    async def start(self) -> PlacementDecision:
        """Decide, load and serve. Raises ConfigError or IntegrityError, and then leaves nothing behind."""
        options, capability = self._options, None
        try:
            files = await asyncio.to_thread(open_model, self._model_dir)
            await asyncio.to_thread(files.small_files)  # checked before the weights, which take minutes
            if options.span is None:
                capability = await in_own_thread(measure_capability, self._model_dir, self._network.peer_id, options)
                decision = await self._decide(capability)
            else:
                start, end = options.span
                decision = PlacementDecision(start=start, end=end, reason="its blocks were given")
            self._on_choice(decision)
            await asyncio.to_thread(options.fetch_blocks, decision.start, decision.end)
            num_blocks = decision.end - decision.start
            server = SpanServer(
                self._network,
                self._membership,
                self._model_dir,
                name=self._name,
                start=decision.start,
                end=decision.end,
                options=await asyncio.to_thread(options_for, num_blocks, self._model_dir, capability, options),
            )
            server.announcer.is_relayed = options.is_relayed()
            self._hidden_size = files.hidden_size
            server.announcer.send_ms = NUM_COPIES * hidden_ms(self._hidden_size, options.up_bytes_per_s)
            await server.start()
        except BaseException:
            self._membership.withdraw("serve", self._name)
            raise
        self.server = server
        self._tell(decision)
        self._watch = asyncio.create_task(self._keep_watch(server, capability), name=f"place {self._name}")
        self._watch.add_done_callback(self._watch_ended)
        return decision

    def _tell(self, decision: PlacementDecision) -> None:
        logger.info("serving blocks %d:%d of %s: %s", decision.start, decision.end, self._name, decision.reason)
        self._on_decision(decision)

    @property
    def failure(self) -> SessionError | None:
        """The reason why the server ended by itself, or its placement did, or None. After that, only `close` is
        useful."""
        if self.server is not None and self.server.failure is not None:
            return self.server.failure
        return self._failure

    def _watch_ended(self, watch: asyncio.Task[None]) -> None:
        if watch.cancelled() or (cause := watch.exception()) is None:
            return
        logger.error("the placement of %s has failed", self._name, exc_info=cause)
        self._failure = SessionError(
            f"placing {self._name} has failed: {type(cause).__name__}: {cause}",
            remedy="start the node again; its log says more",
        )

    async def drain(self, *, within_s: float = 30.0) -> None:
        """Stop moving, and drain the server as `SpanServer.drain` does."""
        await self._end_watch()
        if self.server is not None:
            await self.server.drain(within_s=within_s)

    async def close(self) -> None:
        """Stop moving, and close the server as `SpanServer.close` does; a second call does nothing."""
        try:
            await self._end_watch()
        finally:
            if self.server is not None:
                await self.server.close()

    async def _decide(self, capability: SpanCapability) -> PlacementDecision:
        files, revision = capability.files, capability.revision
        rtt_ms = await self._membership.rtts_ms(await self._servers(revision), timeout_s=LINKS_WITHIN_S)
        capacity = replace(capability.capacity, rtt_ms=rtt_ms)
        # others compute the choice of this node from its links
        capability = replace(capability, capacity=capacity)
        if not capability.is_whole:
            first_choice = await self._chosen(revision, files.num_blocks, capacity)
            self._announce_joining(proposed_span(first_choice, files.num_blocks, capacity), capability)
            await asyncio.sleep(SETTLE_S)
        decision = await self._chosen(revision, files.num_blocks, capacity)
        self._check_upload(capacity.tokens_per_s((decision.start, decision.end), files.num_blocks))
        self._announce_joining((decision.start, decision.end), capability, is_settled=True)
        if capability.room is None:
            return decision
        return replace(decision, reason=f"{decision.reason}; {capability.room.why(decision.end - decision.start)}")

    async def _chosen(self, revision: str, num_blocks: int, capacity: Capacity) -> PlacementDecision:
        # computing the choices of many others that join takes some tenths of a second, in which the node must answer
        return await in_own_thread(choose_span, await self._servers(revision), num_blocks, capacity)

    def _check_upload(self, tokens_per_s: float) -> None:
        """Raise ConfigError if the upload limit allows hardly any tokens."""
        if tokens_per_s < MIN_TOKENS_PER_S and self._options.up_bytes_per_s < math.inf:
            raise ConfigError(
                f"this node would carry {tokens_per_s:.2g} tokens/s of {self._name}: its upload is limited to "
                f"{self._options.up_bytes_per_s * 8 / 1e6:g} Mbit/s",
                remedy="allow more with --max-upload, or give it the model's last blocks with --blocks",
            )

    async def _servers(self, revision: str) -> Mapping[str, ServeRecord]:
        try:
            servers = await self._membership.servers(self._name)
        except PeerTimeout as error:
            logger.warning("cannot see who serves %s: %s", self._name, error)
            return {}
        book = self._options.server.convictions
        convicted = book.peers if book is not None else frozenset()  # clients that hold the evidence do not ask these
        return {
            peer_id: record
            for peer_id, record in servers.items()
            if record.revision == revision and peer_id not in convicted
        }

    def _announce_joining(self, span: tuple[int, int], capability: SpanCapability, *, is_settled: bool = False) -> None:
        """Announce the blocks that will be served. A proposal has no cache room yet (see `placement.is_proposal`), and
        tells the time to send, which others need to compute the choice of this node, even where its span sends
        none."""
        sends_none = is_settled and span[1] == capability.files.num_blocks
        record = ServeRecord(
            model=self._name,
            revision=capability.revision,
            num_blocks=capability.files.num_blocks,
            start=span[0],
            end=span[1],
            max_blocks=capability.capacity.max_blocks,
            state="joining",
            prefill_ms_per_token=capability.speed.prefill_ms,
            decode_ms_per_block=capability.speed.decode_ms,
            free_kv_tokens=int(is_settled),
            rtt_ms=capability.capacity.rtt_ms,
            relayed=self._options.is_relayed(),
            source=capability.files.source,
            send_ms_per_token=0.0 if sends_none else capability.capacity.send_ms,
            manifest=b"" if capability.files.manifest is None else capability.files.manifest.digest,
        )
        self._membership.announce(record)

    async def _keep_watch(self, server: SpanServer, capability: SpanCapability | None) -> None:
        """Search for a better span at times that differ by node, and again before switching. A node whose blocks were
        given stays."""
        wait_s = WATCH_S * (1 + int(turn_hash(self._network.peer_id)[:8], 16) / 2**32)
        while True:
            await asyncio.sleep(wait_s)
            if server.failure is not None:
                return
            try:
                await self._measure_links(server)
                if capability is not None and not capability.is_whole:
                    await self._move_if_better(server, capability)
            except (SwarmError, RuntimeError, MemoryError, OSError) as error:
                # for example if there is no memory for the new blocks beside the old ones, which are still served
                self.num_failed_moves += 1
                logger.warning("could not move to other blocks of %s: %s", self._name, error)
            finally:
                if server.announcer.moving_to != (0, 0) and server.failure is None:
                    server.announcer.moving_to = (0, 0)
                    server.announcer.announce()

    async def _measure_links(self, server: SpanServer) -> None:
        """Measure and announce the links by which sessions are routed, and whether this node is relayed now."""
        servers = await self._servers(server.record.revision)
        rtt_ms = await self._membership.rtts_ms(servers, timeout_s=LINKS_WITHIN_S)
        now = rtt_ms, self._token_ms(servers), self._options.is_relayed()
        announcer = server.announcer
        if now != (announcer.rtt_ms, announcer.token_ms, announcer.is_relayed):
            announcer.rtt_ms, announcer.token_ms, announcer.is_relayed = now
            announcer.announce()

    def _token_ms(self, servers: Collection[str]) -> dict[str, float]:
        """Return the milliseconds that a token's hidden states take from the slowest of those servers whose rates are
        known."""
        rates = list(self._network.links.rates_from(servers).items())[-limits.MAX_RTT_PEERS :]
        token_ms = {peer_id: hidden_ms(self._hidden_size, rate) for peer_id, rate in rates}
        return {peer_id: each for peer_id, each in token_ms.items() if each >= MIN_TOKEN_MS}

    async def _move_if_better(self, server: SpanServer, capability: SpanCapability) -> None:
        move = await self._better(server, capability)
        if move is None:
            return
        options = options_for(move.end - move.start, self._model_dir, capability, self._options)
        # before the move is announced, since this may take long; afterwards this node checks that it still wants to
        # move
        await asyncio.to_thread(self._options.fetch_blocks, move.start, move.end)
        server.announcer.moving_to = move.start, move.end
        server.announcer.announce()
        settled_at = asyncio.get_running_loop().time() + SETTLE_S

        async def still_wanted() -> bool:
            # another node may have announced the same move, and blocks that are on this machine load within a moment
            await asyncio.sleep(settled_at - asyncio.get_running_loop().time())
            again = await self._better(server, capability)
            return again is not None and (again.start, again.end) == (move.start, move.end)

        if self._fits_beside(server, options, move, capability):
            moved = await server.move(
                move.start, move.end, options=options, still_wanted=still_wanted, within_s=MOVE_WITHIN_S
            )
        elif moved := await still_wanted() and await self._may_leave(server, move):
            await server.leave_and_move(move.start, move.end, options=options, within_s=MOVE_WITHIN_S)
        if moved:
            self._tell(move)

    def _fits_beside(
        self, server: SpanServer, options: ServerOptions, move: PlacementDecision, capability: SpanCapability
    ) -> bool:
        """Return whether the new blocks and their cache fit in memory beside the blocks that are served until then, and
        beside those of an earlier move that sessions are still leaving."""
        needs = capability.needs
        if needs is None or self._options.max_bytes is None:
            return True
        old_bytes = sum(
            needs.weight_bytes(len(range(*deployed.blocks))) + deployed.options.kv_bytes
            for deployed in server.deployments
        )
        new_bytes = needs.weight_bytes(move.end - move.start) + max(options.kv_bytes, needs.loading_bytes)
        return old_bytes + new_bytes <= self._options.max_bytes

    async def _may_leave(self, server: SpanServer, move: PlacementDecision) -> bool:
        """Return whether other servers have every block of the span, so that it may be left before the new one is
        there. Otherwise log why the node stays."""
        record = server.record
        span = record.start, record.end
        sole = sole_spans(await self._servers(record.revision), record.num_blocks, self._network.peer_id, span)
        if sole:
            logger.info(
                "staying on blocks %d:%d of %s, though %s: others do not serve %s, and there is no memory for both",
                *span,
                self._name,
                move.reason,
                format_spans(sole),
            )
        return not sole

    async def _better(self, server: SpanServer, capability: SpanCapability) -> PlacementDecision | None:
        """Return a better span, or None. It must be better even without the servers on this node's blocks that do not
        answer: a killed server is listed for a minute."""
        record = server.record
        servers = await self._servers(record.revision)
        block_ms = work_ms(record.decode_ms_per_block, record.prefill_ms_per_token)
        capacity = replace(capability.capacity, rtt_ms=record.rtt_ms, block_ms=block_ms)
        span = record.start, record.end
        move = choose_move(servers, record.num_blocks, capacity, span)
        if move is None:
            return None
        beside = [peer_id for peer_id, each in servers.items() if each.start < record.end and record.start < each.end]
        silent = await self._membership.silent(
            (peer_id for peer_id in beside if peer_id != self._network.peer_id), timeout_s=LINKS_WITHIN_S
        )
        living = {peer_id: each for peer_id, each in servers.items() if peer_id not in silent}
        return choose_move(living, record.num_blocks, capacity, span) if silent else move

    async def _end_watch(self) -> None:
        if self._watch is not None:
            watch, self._watch = self._watch, None
            await end_tasks(watch)
