"""A volunteer's part in serving a model: decides which blocks to take, serves them, and moves when that helps much.

Decisions are `router.placement`'s; this publishes proposals, waits until others see them, and acts. One task, started
by `start` and ended by `close`, watches for a better span.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarm_protocol.errors import ConfigError, PeerTimeout, SessionError, SwarmError
from swarm_protocol.records import ServeRecord

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.router.placement import Capacity, Decision, choose_move, choose_span, rank
from swarm.serving.loading import measure_block, num_blocks_within
from swarm.serving.measure import SpanSpeed
from swarm.serving.model_files import ModelFiles, open_model
from swarm.serving.server import SpanServer
from swarm.serving.server_options import ServerOptions

logger = logging.getLogger(__name__)

SETTLE_S = 3.0
"""Between a proposal and the decision: twice what a record takes to reach everyone, with room to spare. Who comes later
finds this node settled, and chooses around it."""

WATCH_S = 20.0
"""Between looks for a better span, longer by up to as much again, so that not all move at once."""

MOVE_WITHIN_S = 30.0
"""What sessions on the old span get to go elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolunteerOptions:
    """`span` fixes the blocks; else as many as `max_blocks` and `max_bytes` (cache included) allow are placed."""

    span: tuple[int, int] | None = None
    max_blocks: int | None = None
    max_bytes: int | None = None
    server: ServerOptions = field(default_factory=ServerOptions)

    def __post_init__(self) -> None:
        if self.max_blocks is not None and self.max_blocks < 1:
            raise ConfigError(f"max_blocks is {self.max_blocks}", remedy="allow 1 block or more")
        if self.span is not None and not 0 <= self.span[0] < self.span[1]:
            raise ConfigError(
                f"blocks {self.span[0]}:{self.span[1]} are no span", remedy="use START:END with START < END"
            )


class Volunteer:
    """`on_decision` hears of the first span and of each move, after it is served."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        model_dir: Path,
        *,
        name: str,
        options: VolunteerOptions,
        on_decision: Callable[[Decision], None] | None = None,
    ) -> None:
        self.server: SpanServer | None = None
        self.num_failed_moves = 0
        self._network = network
        self._membership = membership
        self._model_dir = model_dir
        self._name = name
        self._options = options
        self._on_decision = on_decision
        self._capacity: Capacity | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> Decision:
        """Decide, load and serve. Raises ConfigError or IntegrityError, and then nothing is left behind."""
        try:
            decision = await self._decide()
            server = SpanServer(
                self._network,
                self._membership,
                self._model_dir,
                name=self._name,
                start=decision.start,
                end=decision.end,
                options=self._options.server,
            )
            await server.start()
        except BaseException:
            self._membership.withdraw("serve", self._name)
            raise
        self.server = server
        self._tell(decision)
        if self._capacity is not None:
            self._watch = asyncio.create_task(self._keep_watch(server, self._capacity), name=f"place {self._name}")
        return decision

    def _tell(self, decision: Decision) -> None:
        logger.info("serving blocks [%d, %d) of %s: %s", decision.start, decision.end, self._name, decision.reason)
        if self._on_decision is not None:
            self._on_decision(decision)

    @property
    def failure(self) -> SessionError | None:
        """Why the server ended by itself, if it did; what is left to do then is to close."""
        return None if self.server is None else self.server.failure

    async def drain(self, *, within_s: float = 30.0) -> None:
        """See `SpanServer.drain`."""
        await self._end_watch()
        if self.server is not None:
            await self.server.drain(within_s=within_s)

    async def close(self) -> None:
        """See `SpanServer.close`. Idempotent."""
        try:
            await self._end_watch()
        finally:
            if self.server is not None:
                await self.server.close()

    # --- which blocks -----------------------------------------------------------------------------------------------

    async def _decide(self) -> Decision:
        if self._options.span is not None:
            start, end = self._options.span
            return Decision(start=start, end=end, reason="as told")
        files, num_blocks, speed, revision = await asyncio.to_thread(self._measure)
        capacity = Capacity(peer_id=self._network.peer_id, num_blocks=num_blocks, block_ms=speed.decode_ms)
        if num_blocks < files.num_blocks:
            self._capacity = capacity
            proposal = choose_span(await self._servers(revision), files.num_blocks, capacity)
            self._announce_joining(proposal, files, revision, speed, is_settled=False)
            await asyncio.sleep(SETTLE_S)
        decision = choose_span(await self._servers(revision), files.num_blocks, capacity)
        self._announce_joining(decision, files, revision, speed, is_settled=True)
        return decision

    def _measure(self) -> tuple[ModelFiles, int, SpanSpeed, str]:
        files, options = open_model(self._model_dir), self._options
        num_blocks = min(options.max_blocks or files.num_blocks, files.num_blocks)
        if options.max_bytes is not None:
            num_blocks = min(num_blocks, num_blocks_within(files, options.max_bytes, options.server))
        return files, num_blocks, measure_block(files, options.server), files.revision()

    async def _servers(self, revision: str) -> Mapping[str, ServeRecord]:
        try:
            servers = await self._membership.servers(self._name)
        except PeerTimeout as error:
            logger.warning("cannot see who serves %s: %s", self._name, error)
            return {}
        return {peer_id: record for peer_id, record in servers.items() if record.revision == revision}

    def _announce_joining(
        self, decision: Decision, files: ModelFiles, revision: str, speed: SpanSpeed, *, is_settled: bool
    ) -> None:
        """A proposal has no cache room yet (see `placement.is_proposal`)."""
        record = ServeRecord(
            model=self._name,
            revision=revision,
            num_blocks=files.num_blocks,
            start=decision.start,
            end=decision.end,
            state="joining",
            prefill_ms_per_token=speed.prefill_ms,
            decode_ms_per_block=speed.decode_ms,
            free_kv_tokens=int(is_settled),
        )
        self._membership.announce(record)

    # --- a better span ----------------------------------------------------------------------------------------------

    async def _keep_watch(self, server: SpanServer, capacity: Capacity) -> None:
        """Everyone looks at another moment, and looks again before it switches."""
        wait_s = WATCH_S * (1 + int(rank(self._network.peer_id)[:8], 16) / 2**32)
        while True:
            await asyncio.sleep(wait_s)
            try:
                await self._move_if_better(server, capacity)
            except (SwarmError, RuntimeError, MemoryError, OSError) as error:
                # as when there is no memory for the new blocks beside the old ones, which go on
                self.num_failed_moves += 1
                logger.warning("could not move to other blocks of %s: %s", self._name, error)

    async def _move_if_better(self, server: SpanServer, capacity: Capacity) -> None:
        move = await self._better(server, capacity)
        if move is None:
            return

        async def still_wanted() -> bool:
            again = await self._better(server, capacity)
            return again is not None and (again.start, again.end) == (move.start, move.end)

        if await server.move(move.start, move.end, still_wanted=still_wanted, within_s=MOVE_WITHIN_S):
            self._tell(move)

    async def _better(self, server: SpanServer, capacity: Capacity) -> Decision | None:
        record = server.record
        servers = await self._servers(record.revision)
        return choose_move(servers, record.num_blocks, capacity, (record.start, record.end))

    async def _end_watch(self) -> None:
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.cancel()
            await asyncio.wait({watch})
            if not watch.cancelled():
                watch.result()
