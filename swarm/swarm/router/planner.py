"""Plans which blocks hypothetical nodes would take: they join one after another and then move. The module is pure.

It makes up a record for each node. From these records `placement` chooses the spans, and `routing` finds the chain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import peer_id_of
from swarm_protocol.records import ServeRecord

from swarm.router.block_budget import ModelNeeds, block_budget, comfortable_bytes, kv_bytes_beside
from swarm.router.placement import (
    Capacity,
    Coverage,
    PlacementDecision,
    choose_move,
    choose_span,
    tokens_per_s,
    work_ms,
)
from swarm.router.routing import Chain, NoChain, RoutingContext, find_chain, missing_spans

MAX_ROUNDS = 50
"""Maximum rounds of moves. Moves normally end after a few; this bounds the case in which they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    """A node to plan with. Times are milliseconds of one block for one token.

    `rtt_ms` are round trips to other nodes, by name.
    """

    name: str
    memory_bytes: int
    decode_ms: float
    prefill_ms: float = 0.0
    relayed: bool = False
    client_rtt_ms: float | None = None
    rtt_ms: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def peer_id(self) -> str:
        """A made-up peer id that depends only on the name."""
        return peer_id_of(hashlib.sha256(self.name.encode()).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSpan:
    """The span that one node would take, or None if it cannot hold a block."""

    name: str
    span: tuple[int, int] | None
    kv_tokens: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """The result of planning. `lacking` has each span that no node would serve, with the memory in bytes that one node
    needs to serve it.

    `tokens_per_s` is the speed of the slowest block, for all requests together; 0 while blocks are missing.
    """

    taken: tuple[PlannedSpan, ...]
    lacking: tuple[tuple[tuple[int, int], int], ...]
    tokens_per_s: float
    chain: Chain | None


def plan(needs: ModelNeeds, nodes: Sequence[PlannedNode]) -> PlacementPlan:
    """Plan for nodes that join in the order given."""
    swarm = _Swarm(needs, nodes)
    for node in nodes:
        swarm.join(node)
    for _ in range(MAX_ROUNDS):
        if not sum([swarm.move(node) for node in nodes]):
            break
    return swarm.plan()


class _Swarm:
    """The nodes of a plan that have joined so far, with the blocks that each has taken."""

    def __init__(self, needs: ModelNeeds, nodes: Sequence[PlannedNode]) -> None:
        self._needs = needs
        self._nodes = nodes
        self._peer_ids = {node.name: node.peer_id for node in nodes}
        self._servers: dict[str, ServeRecord] = {}
        self._capacities: dict[str, Capacity] = {}
        self._reasons: dict[str, str] = {}

    def join(self, node: PlannedNode) -> None:
        try:
            room = block_budget(self._needs, node.memory_bytes, node.memory_bytes)
        except ConfigError as error:
            self._reasons[node.name] = error.message
            return
        capacity = Capacity(
            peer_id=node.peer_id,
            num_blocks=room.num_blocks,
            max_blocks=room.max_blocks,
            block_ms=work_ms(node.decode_ms, node.prefill_ms),
            rtt_ms={self._peer_ids[name]: rtt_ms for name, rtt_ms in node.rtt_ms.items() if name in self._peer_ids},
        )
        self._capacities[node.name] = capacity
        decision = choose_span(self._servers, self._needs.num_blocks, capacity)
        self._put(node, decision, f"{decision.reason}; {room.why(decision.end - decision.start)}")

    def move(self, node: PlannedNode) -> bool:
        if (capacity := self._capacities.get(node.name)) is None:
            return False
        record = self._servers[node.peer_id]
        move = choose_move(self._servers, self._needs.num_blocks, capacity, (record.start, record.end))
        if move is not None:
            self._put(node, move, f"moved when the others had joined: {move.reason}")
        return move is not None

    def _put(self, node: PlannedNode, decision: PlacementDecision, reason: str) -> None:
        num_blocks = decision.end - decision.start
        cache_bytes = kv_bytes_beside(self._needs, num_blocks, node.memory_bytes, node.memory_bytes)
        nearest = sorted(self._capacities[node.name].rtt_ms.items(), key=lambda item: item[1])
        self._reasons[node.name] = reason
        self._servers[node.peer_id] = ServeRecord(
            model="model",
            revision="planned",
            num_blocks=self._needs.num_blocks,
            start=decision.start,
            end=decision.end,
            state="serving",
            prefill_ms_per_token=node.prefill_ms,
            decode_ms_per_block=node.decode_ms,
            free_kv_tokens=min(cache_bytes // (num_blocks * self._needs.kv_bytes), limits.MAX_KV_TOKENS),
            rtt_ms=dict(nearest[: limits.MAX_RTT_PEERS]),
            relayed=node.relayed,
        )

    def plan(self) -> PlacementPlan:
        missing = missing_spans(self._servers, self._needs.num_blocks)
        return PlacementPlan(
            taken=tuple(self._taken(node) for node in self._nodes),
            lacking=tuple((span, comfortable_bytes(self._needs, span[1] - span[0])) for span in missing),
            tokens_per_s=self._slowest(),
            chain=self._chain(),
        )

    def _taken(self, node: PlannedNode) -> PlannedSpan:
        record = self._servers.get(node.peer_id)
        return PlannedSpan(
            name=node.name,
            span=None if record is None else (record.start, record.end),
            kv_tokens=0 if record is None else record.free_kv_tokens,
            reason=self._reasons[node.name],
        )

    def _slowest(self) -> float:
        cover = Coverage(self._needs.num_blocks)
        for name, capacity in self._capacities.items():
            record = self._servers[self._peer_ids[name]]
            cover.add((record.start, record.end), tokens_per_s(capacity.block_ms, record.end - record.start))
        return cover.health().slowest

    def _chain(self) -> Chain | None:
        """Return the chain that the first client would get, with names instead of peer ids; None if blocks are
        missing."""
        rtts = {node.peer_id: node.client_rtt_ms for node in self._nodes}
        context = RoutingContext(rtt_ms={peer_id: ms for peer_id, ms in rtts.items() if ms is not None}, load={})
        try:
            chain = find_chain(self._servers, 0, self._needs.num_blocks, context)
        except NoChain:
            return None
        names = {peer_id: name for name, peer_id in self._peer_ids.items()}
        return replace(chain, hops=tuple(replace(hop, peer_id=names[hop.peer_id]) for hop in chain.hops))
