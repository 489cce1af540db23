"""Simulates servers of a model's blocks, and gateways that request answers, with the real placement and routing.

A server decides as `serving.server.span_placer` does. It proposes a span, waits for the proposals of others, downloads
its blocks at the rate of its downlink, serves them, and searches for a better span at intervals. It refuses sessions
for whose tokens its cache has no room, and announces its load as `serving.server.span_announcer` does.

Computing and streams are not simulated. An answer takes the time that the router expects of its chain under the load
that the servers have announced. If a server of the chain has left by then, the gateway takes another chain for the
second half of the answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, PeerRefused, PeerTimeout
from swarm_protocol.records import ServeRecord

from swarm.held_counts import HeldCounts
from swarm.network.membership import Membership
from swarm.router.block_budget import ModelNeeds, block_budget, kv_bytes_beside
from swarm.router.placement import (
    Capacity,
    PlacementDecision,
    choose_move,
    choose_span,
    proposed_span,
    turn_hash,
    work_ms,
)
from swarm.router.routing import Chain, NoChain, RoutingContext, find_chain
from swarm.simulation.report import Measurements
from swarm.simulation.scenario import Model, NodeClass
from swarm.simulation.simulated_network import SimulatedNetwork

SETTLE_S = 3.0
WATCH_S = 20.0
LINKS_WITHIN_S = 2.0
ANNOUNCE_S = 3.0
"""The values of `span_placer` and `span_announcer`, which are not imported because they import torch."""

LIST_S = 15.0
"""Seconds between a gateway's lookups of the servers."""

MAX_TRIES = 4
"""Number of chains that a request may try before it fails."""

FULL_S = 1.0
"""Seconds for which a gateway does not ask a server that has refused a session."""

GIB, MIB, KIB = 2**30, 2**20, 2**10
REVISION = "simulated"


def _needs_of(model: Model) -> ModelNeeds:
    return ModelNeeds(
        num_blocks=model.blocks,
        block_bytes=int(model.block_mib * MIB),
        ends_bytes=0,
        kv_bytes=int(model.kv_kib_per_token * KIB),
        context_tokens=model.prompt_tokens + model.answer_tokens,
    )


class SimulatedServer:
    """Serves a span of `model` in virtual time. `record` is what it announces, or None until it has chosen a span."""

    def __init__(
        self, network: SimulatedNetwork, membership: Membership, model: Model, kind: NodeClass, *, relayed: bool
    ) -> None:
        self._network = network
        self._membership = membership
        self._model = model
        self._kind = kind
        self._needs = _needs_of(model)
        self._max_bytes = int(kind.memory_gib * GIB)
        self._relayed = relayed
        self._num_sessions = 0
        self._held_tokens = 0
        self._has_changed = asyncio.Event()
        self.record: ServeRecord | None = None

    @contextmanager
    def session(self, num_tokens: int) -> Iterator[None]:
        """Reserve cache for `num_tokens` while this context lasts. Raises PeerRefused if there is no room."""
        record, peer_id = self.record, self._network.peer_id
        if record is None or record.state != "serving":
            raise PeerRefused("the server does not serve yet", peer_id=peer_id)
        if self._held_tokens + num_tokens > self._cache_tokens(record.end - record.start):
            raise PeerRefused("the server's cache is full", peer_id=peer_id)
        self._change_load(1, num_tokens)
        try:
            yield
        finally:
            self._change_load(-1, -num_tokens)

    def _change_load(self, num_sessions: int, num_tokens: int) -> None:
        self._num_sessions += num_sessions
        self._held_tokens += num_tokens
        self._has_changed.set()

    async def run(self) -> None:
        """Serve until cancelled. A node whose memory is too small for one block does nothing."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._announce_load())
            tasks.create_task(self._serve())

    async def _announce_load(self) -> None:
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            if self.record is not None:
                self._announce(self.record)
            await asyncio.sleep(ANNOUNCE_S)

    async def _serve(self) -> None:
        try:
            room = block_budget(self._needs, self._max_bytes, self._max_bytes)
        except ConfigError:
            return
        capacity = Capacity(
            peer_id=self._network.peer_id,
            num_blocks=room.num_blocks,
            max_blocks=room.max_blocks,
            block_ms=work_ms(self._kind.decode_ms_per_block, self._kind.prefill_ms_per_token),
        )
        record = await self._begin(await self._with_links(capacity))
        wait_s = WATCH_S * (1 + int(turn_hash(self._network.peer_id)[:8], 16) / 2**32)
        while True:
            await asyncio.sleep(wait_s)
            capacity = await self._with_links(capacity)
            if dict(capacity.rtt_ms) != dict(record.rtt_ms):
                record = self._announce(replace(record, rtt_ms=capacity.rtt_ms))
            move = choose_move(await self._servers(), self._model.blocks, capacity, (record.start, record.end))
            if move is not None:
                record = self._announce(replace(record, next_start=move.start, next_end=move.end))
                await self._load(move)
                again = choose_move(await self._servers(), self._model.blocks, capacity, (record.start, record.end))
                if again is None or (again.start, again.end) != (move.start, move.end):
                    move = PlacementDecision(start=record.start, end=record.end, reason="the move no longer helps")
                record = self._announce(self._serving(move, capacity))

    async def _begin(self, capacity: Capacity) -> ServeRecord:
        decision = choose_span(await self._servers(), self._model.blocks, capacity)
        start, end = proposed_span(decision, self._model.blocks, capacity)
        joining = replace(self._serving(decision, capacity), start=start, end=end, max_blocks=capacity.max_blocks)
        self._announce(replace(joining, state="joining", free_kv_tokens=0))
        await asyncio.sleep(SETTLE_S)
        decision = choose_span(await self._servers(), self._model.blocks, capacity)
        serving = self._serving(decision, capacity)
        self._announce(replace(serving, state="joining", free_kv_tokens=1))
        await self._load(decision)
        return self._announce(serving)

    def _serving(self, decision: PlacementDecision, capacity: Capacity) -> ServeRecord:
        return ServeRecord(
            model=self._model.name,
            revision=REVISION,
            num_blocks=self._model.blocks,
            start=decision.start,
            end=decision.end,
            state="serving",
            prefill_ms_per_token=self._kind.prefill_ms_per_token,
            decode_ms_per_block=self._kind.decode_ms_per_block,
            free_kv_tokens=self._cache_tokens(decision.end - decision.start),
            rtt_ms=capacity.rtt_ms,
            relayed=self._relayed,
        )

    def _cache_tokens(self, num_blocks: int) -> int:
        cache_bytes = kv_bytes_beside(self._needs, num_blocks, self._max_bytes, self._max_bytes)
        return min(cache_bytes // (num_blocks * self._needs.kv_bytes), limits.MAX_KV_TOKENS)

    async def _load(self, decision: PlacementDecision) -> None:
        num_bytes = (decision.end - decision.start) * self._needs.block_bytes
        await asyncio.sleep(num_bytes / self._network.host.down.bytes_per_s)

    def _announce(self, record: ServeRecord) -> ServeRecord:
        if record.state == "serving":
            free_tokens = max(0, self._cache_tokens(record.end - record.start) - self._held_tokens)
            record = replace(record, queue_depth=self._num_sessions, free_kv_tokens=free_tokens)
        self._membership.announce(record)
        self.record = record
        return record

    async def _servers(self) -> dict[str, ServeRecord]:
        try:
            return await self._membership.servers(self._model.name)
        except PeerTimeout:
            return {}

    async def _with_links(self, capacity: Capacity) -> Capacity:
        servers = await self._servers()
        return replace(capacity, rtt_ms=await self._membership.rtts_ms(servers, timeout_s=LINKS_WITHIN_S))


class SimulatedGateway:
    """Requests `requests_per_s()` answers a second on average, at random times. `server_at` returns the server of a
    peer id, or None."""

    def __init__(
        self,
        network: SimulatedNetwork,
        membership: Membership,
        model: Model,
        requests_per_s: Callable[[], float],
        server_at: Callable[[str], SimulatedServer | None],
        measured: Measurements,
    ) -> None:
        self._network = network
        self._membership = membership
        self._model = model
        self._requests_per_s = requests_per_s
        self._server_at = server_at
        self._measured = measured
        self._random = random.Random(network.peer_id)
        self._load = HeldCounts[str]()
        self._gone: set[str] = set()
        self._full: dict[str, float] = {}
        self._servers: dict[str, ServeRecord] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._refresh_servers())
            while rate := self._requests_per_s():
                await asyncio.sleep(self._random.expovariate(rate))
                tasks.create_task(self._request())

    async def _refresh_servers(self) -> None:
        while True:
            try:
                self._servers = await self._membership.servers(self._model.name)
                await self._membership.rtts_ms(self._servers, timeout_s=LINKS_WITHIN_S)
                self._gone.intersection_update(self._servers)
            except PeerTimeout:
                self._measured.count("lists failed")
            await asyncio.sleep(LIST_S)

    async def _request(self) -> None:
        """Simulate one request. It takes the time that the router expects of its chains, and the waits for full
        servers."""
        began, tokens = asyncio.get_running_loop().time(), self._model.answer_tokens
        self._measured.count("requests")
        for _ in range(MAX_TRIES):
            try:
                chain = self._find_chain(self._model.prompt_tokens + tokens)
                await self._answer(chain, tokens)
            except PeerRefused as refusal:
                self._measured.count("sessions refused")
                self._full[refusal.peer_id] = asyncio.get_running_loop().time() + FULL_S
                continue
            except NoChain:
                if not self._full_servers():
                    break
                await asyncio.sleep(FULL_S)
                continue
            lost = [hop.peer_id for hop in chain.hops if not self._network.host.sees(hop.peer_id)]
            if not lost:
                seconds = asyncio.get_running_loop().time() - began
                self._measured.count("answers")
                self._measured.count("answer tokens", tokens)
                self._measured.take(self._measured.answer_tokens_per_s, tokens / seconds)
                return
            self._gone.update(lost)
            self._measured.count("servers lost in an answer", len(lost))
            tokens = max(1, tokens // 2)  # on average, half of the answer was complete
        self._measured.count("requests failed")

    async def _answer(self, chain: Chain, tokens: int) -> None:
        """Hold a session on each server of the chain while the answer takes time. Raises PeerRefused."""
        prompt_tokens = self._model.prompt_tokens
        with ExitStack() as sessions:
            for hop in chain.hops:
                sessions.enter_context(self._load.holding(hop.peer_id))
                if (server := self._server_at(hop.peer_id)) is not None:
                    sessions.enter_context(server.session(prompt_tokens + tokens))
            prompt_ms = sum(hop.record.prefill_ms_per_token * (hop.end - hop.start) for hop in chain.hops)
            decode_ms = sum(hop.record.decode_ms_per_block * (hop.end - hop.start) for hop in chain.hops)
            self._measured.count("work s", (tokens * decode_ms + prompt_tokens * prompt_ms) / 1e3)
            await asyncio.sleep((tokens * chain.cost_ms + prompt_tokens * prompt_ms) / 1e3)

    def _full_servers(self) -> set[str]:
        """Return the servers that have refused a session within FULL_S."""
        now_s = asyncio.get_running_loop().time()
        self._full = {peer_id: until_s for peer_id, until_s in self._full.items() if until_s > now_s}
        return set(self._full)

    def _find_chain(self, max_tokens: int) -> Chain:
        context = RoutingContext(
            rtt_ms=self._membership.known_rtts_ms(self._servers),
            load=self._load,
            barred=self._gone,
            full=self._full_servers(),
            max_tokens=max_tokens,
            salt=str(self._random.random()),
        )
        return find_chain(self._servers, 0, self._model.blocks, context)
