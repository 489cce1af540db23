"""Chooses the servers that together answer for a model: the cheapest chain over (peer, block). The module is pure and
keeps no state.

Activations go from server to server. So a chain costs half a round trip for each link: from the client to the first
server, between neighbours, and from the last server back. To these come the time to send a token over a limited upload
or a slow link, and the time of each block, which is higher where other sessions wait and where the cache is nearly
full. Because blocks are charged and not nodes, a split of 20+20 blocks beats 38+2.

A server first runs the prompt, apart from the pages that its cache still has from an earlier request. So the choice
also counts the prompt's time, spread over the tokens of a usual answer: a conversation goes on where its cache is,
unless other servers are so much faster or less busy that running it again there takes less time.

Every block is computed by one of the servers that have it, so Viterbi's algorithm finds the cheapest chain exactly. The
session decides what to do when a chain breaks. The client provides the round trips of its links and its own load.

Shapes: B blocks, P servers.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from swarm_protocol.errors import SessionError
from swarm_protocol.records import ServeRecord

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Spans = tuple[tuple[int, int], ...]


DEFAULT_RTT_MS = 50.0
"""The assumed round trip of a link that was not measured yet: that of a link across a continent, so that such links are
neither avoided nor preferred to measured ones."""

HOP_OVERHEAD_MS = 1.0
"""Cost of wire and scheduling for each hop, so that a chain of fewer servers wins if links cost nothing."""

RELAY_MS = 10.0
"""Extra cost, beyond the RTT, of reaching a server through a relay, which has little capacity to spare and may
leave."""

MIN_BLOCK_MS = 0.01
"""Minimum time of a block. A lower claim of a peer is raised to it."""

SESSION_SHARE = 0.25
"""Share of a pass that each other session adds to it: a server decodes all of them as one batch. Batches of 16 on CPUs
show half as much (`docs/explanation/measurements.md`), and prompts come between."""

ANSWER_TOKENS = 256
"""Tokens of a usual answer, over which the time of its prompt is spread. Shorter ones have room for fewer."""

MAX_CANDIDATES = 16
"""Maximum servers that compete for a block, so that a decision takes milliseconds.

If a block has more servers, those with the cheapest blocks and the shortest round trip to the client compete, and the
salt decides among equals. With fewer servers for every block, the chain is the cheapest possible one.
"""


class NoChain(SessionError):
    """No chain covers the blocks. `missing` are the spans of blocks that no server can serve now."""

    def __init__(self, message: str, *, remedy: str, missing: Spans) -> None:
        super().__init__(message, remedy=remedy)
        self.missing = missing

    def after_waiting(self, waited_s: float) -> NoChain:
        """Return the same error, which also says for how long the session waited for another server."""
        message = f"{self.message}, and no other server took over within {waited_s:.0f} s"
        return type(self)(message, remedy=self.remedy, missing=self.missing)


class NoRoom(NoChain):
    """Servers have the blocks, but none of them has room now for a session of this size."""


class NeverRoom(NoRoom):
    """No server of the `missing` blocks ever has room for a session of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Blocks `[start, end)` on one peer, with the peer's record."""

    peer_id: str
    start: int
    end: int
    cost_ms: float
    record: ServeRecord = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Hops that cover the wanted blocks without gap or overlap; `cost_ms` is the cost of one token, mostly its expected
    time."""

    hops: tuple[Hop, ...]
    cost_ms: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingContext:
    """Holds what the asking client knows: round trips, its own open sessions by peer, and recent failures and refusals.

    Peers to `avoid`, and servers whose record has no room for `max_tokens`, are used only for blocks that no other
    server can take; `barred` and `full` peers are not used at all, and `why_barred` tells what is known to have failed.
    `salt` decides between chains of equal cost, so that clients with different salts spread over them. The wanted
    blocks may be in the middle of a longer chain, between `previous_peer_id` and `next_peer_id`; an empty id stands for
    the client. `cost_factors` multiply the cost of a server's blocks; they come from the client's own checks, and the
    default is 1. A prompt of `num_prompt_tokens` is run first, without the first `cached_tokens` of a server, which it
    probably still has.
    """

    rtt_ms: Mapping[str, float]
    load: Mapping[str, int]
    avoid: Collection[str] = ()
    barred: Collection[str] = ()
    why_barred: Mapping[str, str] = field(default_factory=dict)
    full: Collection[str] = ()
    max_tokens: int = 1
    salt: str = ""
    previous_peer_id: str = ""
    next_peer_id: str = ""
    cost_factors: Mapping[str, float] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    cached_tokens: Mapping[str, int] = field(default_factory=dict)


Usable = Sequence[tuple[str, ServeRecord]]


def find_chain(servers: Mapping[str, ServeRecord], start: int, end: int, context: RoutingContext) -> Chain:
    """Return the cheapest chain for blocks `[start, end)`. The chain may use a part of a server's span.

    `servers` are of one revision. Only those in state "serving" that are neither barred nor full are considered.
    Raises NoChain.
    """
    usable = _usable(servers, start, end, context)
    num_usable = len(usable)
    covers_PB = _covers(usable, start, end)
    if missing := runs(np.logical_not(covers_PB.any(axis=0)), start):
        serving = [(peer_id, record) for peer_id, record in servers.items() if record.state == "serving"]
        unserved = runs(np.logical_not(_covers(serving, start, end).any(axis=0)), start)
        raise _no_chain(serving, missing, unserved, context)
    decode_load_P, prompt_load_P = _loads(usable, context)
    block_P = decode_load_P * [max(record.decode_ms_per_block, MIN_BLOCK_MS) for _, record in usable]
    prompt_P = prompt_load_P * _prompt_ms(usable, context)
    kept_P = shortlist(covers_PB, _by_merit(usable, block_P + prompt_P, covers_PB, context))
    usable, prompt_P = [usable[p] for p in kept_P], prompt_P[kept_P]
    costs = _costs(servers, usable, block_P[kept_P] + prompt_P, context)
    walk, done_ms = cheapest_walk(covers_PB[kept_P], costs)
    # what the chain promises is the time of a token without the prompt's
    done_ms = (done_ms - prompt_P[walk].cumsum()).tolist()

    hops: list[Hop] = []
    for p, blocks in groupby(range(end - start), key=walk.__getitem__):
        first, *rest = blocks
        last = rest[-1] if rest else first
        cost_ms = done_ms[last] - (done_ms[first - 1] if first else 0.0)
        peer_id, record = usable[p]
        hops.append(Hop(peer_id=peer_id, start=start + first, end=start + last + 1, cost_ms=cost_ms, record=record))
    reason = f"{done_ms[-1]:.1f} ms a token over {len(hops)} of {num_usable} usable servers"
    return Chain(hops=tuple(hops), cost_ms=done_ms[-1], reason=reason)


def missing_spans(servers: Mapping[str, ServeRecord], num_blocks: int) -> Spans:
    """Return the blocks that no server serves."""
    missing, covered = [], 0
    for start, end in sorted((record.start, record.end) for record in servers.values() if record.state == "serving"):
        if covered < start:
            missing.append((covered, start))
        covered = max(covered, end)
    return (*missing, (covered, num_blocks)) if covered < num_blocks else tuple(missing)


def _usable(servers: Mapping[str, ServeRecord], start: int, end: int, context: RoutingContext) -> Usable:
    """Return the usable servers that have some of the blocks. A server to avoid, or without room, is included only if
    it has a block that no other usable server has: one that is asked may make room."""
    able = {
        peer_id: record
        for peer_id, record in servers.items()
        if record.state == "serving"
        and record.start < end
        and start < record.end
        and peer_id not in context.barred
        and peer_id not in context.full
    }
    usable = {
        peer_id: record
        for peer_id, record in able.items()
        if peer_id not in context.avoid and record.free_kv_tokens >= context.max_tokens
    }
    covers_PB = _covers(list(usable.items()), start, end)
    gaps = runs(np.logical_not(covers_PB.any(axis=0)), start) if len(usable) < len(able) else ()
    return list(usable.items()) + [
        (peer_id, record) for peer_id, record in able.items() if peer_id not in usable and _has_any(record, gaps)
    ]


def _covers(usable: Usable, start: int, end: int) -> Bools:
    start_P = np.array([record.start for _, record in usable], dtype=np.int64)
    end_P = np.array([record.end for _, record in usable], dtype=np.int64)
    block_B = np.arange(start, end)
    return (start_P[:, None] <= block_B) & (block_B < end_P[:, None])


def _loads(usable: Usable, context: RoutingContext) -> tuple[Floats, Floats]:
    """Return the factors by which the load of other sessions and of this one slows each server's decoding, and its
    prompts [P]."""
    load, max_tokens, factors = context.load, context.max_tokens, context.cost_factors
    factor_P = np.array([factors.get(peer_id, 1.0) for peer_id, _ in usable], dtype=np.float64)
    waiting_P = np.array([max(r.queue_depth, load.get(peer_id, 0)) for peer_id, r in usable], dtype=np.float64)
    room_P = max_tokens / np.array([max(1, record.free_kv_tokens) for _, record in usable], dtype=np.float64)
    return factor_P * (1 + SESSION_SHARE * waiting_P + room_P), factor_P * (1 + waiting_P + room_P)


def _prompt_ms(usable: Usable, context: RoutingContext) -> Floats:
    """Return the milliseconds that a block takes for the prompt, for each token of the answer [P]."""
    cached_P = np.array([context.cached_tokens.get(peer_id, 0) for peer_id, _ in usable], dtype=np.int64)
    prefill_P = np.array([record.prefill_ms_per_token for _, record in usable], dtype=np.float64)
    num_answered = max(1, min(ANSWER_TOKENS, context.max_tokens - context.num_prompt_tokens))
    return np.maximum(context.num_prompt_tokens - cached_P, 0) * prefill_P / num_answered


def _by_merit(usable: Usable, block_P: Floats, covers_PB: Bools, context: RoutingContext) -> NDArray[np.intp]:
    """Return the indices of the servers by the cost of a block plus its share of the round trip to the client, then by
    salt [P]."""
    rtt_ms = context.rtt_ms
    rtt_P = np.array([rtt_ms.get(peer_id, DEFAULT_RTT_MS) for peer_id, _ in usable])
    merit_P = block_P + (rtt_P + HOP_OVERHEAD_MS) / covers_PB.sum(axis=1)
    draw_P = np.random.default_rng(zlib.crc32(context.salt.encode())).permutation(len(usable))
    return np.lexsort((draw_P, merit_P))


def _costs(servers: Mapping[str, ServeRecord], usable: Usable, block_P: Floats, context: RoutingContext) -> Costs:
    overhead_P = np.array([HOP_OVERHEAD_MS + (RELAY_MS if record.relayed else 0.0) for _, record in usable])
    send_P = np.array([record.send_ms_per_token for _, record in usable])
    link_PP = _links(usable) / 2 + overhead_P + np.maximum(send_P[:, None], _transfers(usable))
    np.fill_diagonal(link_PP, 0.0)
    before = context.previous_peer_id
    receive_P = np.array([record.token_ms.get(before, 0.0) for _, record in usable])
    after = servers[context.next_peer_id].token_ms if context.next_peer_id in servers else {}
    forward_P = np.maximum(send_P, [after.get(peer_id, 0.0) for peer_id, _ in usable])
    return Costs(
        enter_P=_round_trips_to(servers, usable, context, before) / 2 + overhead_P + receive_P,
        link_PP=link_PP,
        block_P=block_P,
        leave_P=_round_trips_to(servers, usable, context, context.next_peer_id) / 2
        + (forward_P if context.next_peer_id else 0.0),
    )


def _round_trips_to(
    servers: Mapping[str, ServeRecord], usable: Usable, context: RoutingContext, peer_id: str
) -> Floats:
    """Return the round trips between the servers and `peer_id`, or the client if `peer_id` is empty [P]."""
    if not peer_id:
        return np.array([context.rtt_ms.get(server, DEFAULT_RTT_MS) for server, _ in usable])
    theirs = servers[peer_id].rtt_ms if peer_id in servers else {}
    both = [(theirs.get(server), record.rtt_ms.get(peer_id)) for server, record in usable]
    return np.array([max((ms for ms in pair if ms is not None), default=DEFAULT_RTT_MS) for pair in both])


def _links(usable: Usable) -> Floats:
    """Return the round trips between servers [P, P]: the longer of both servers' claims, so that no claim makes a
    server nearer."""
    announced_PP = _announced(usable, [record.rtt_ms for _, record in usable], unknown=-1.0)
    known_PP = np.maximum(announced_PP, announced_PP.T)
    return np.where(known_PP < 0, DEFAULT_RTT_MS, known_PP)


def _transfers(usable: Usable) -> Floats:
    """Return the milliseconds that a token's hidden states take from each server (row) to each other one (column), as
    the receiver measured. Unmeasured links add nothing. A server's claim can only make links to that server slower."""
    return _announced(usable, [record.token_ms for _, record in usable], unknown=0.0).T


def _announced(usable: Usable, claims: Sequence[Mapping[str, float]], *, unknown: float) -> Floats:
    """Return the value that each server (row) has announced for each other one (column), or `unknown`."""
    index = {peer_id: p for p, (peer_id, _) in enumerate(usable)}
    announced_PP = np.full((len(usable), len(usable)), unknown)
    for p, of_others in enumerate(claims):
        for peer_id, ms in of_others.items():
            if (q := index.get(peer_id)) is not None:
                announced_PP[p, q] = ms
    return announced_PP


def _no_chain(serving: Usable, missing: Spans, unserved: Spans, context: RoutingContext) -> NoChain:
    """Return the error for the `missing` blocks, of which nobody serves those `unserved`."""
    kind, told = NoChain, format_spans(unserved or missing)
    if unserved:
        cause, remedy = "nobody serves them", "wait for a server to join, or start one: it takes the missing blocks"
    elif (failed := {peer_id for peer_id, record in serving if _has_any(record, missing)}) <= set(context.barred):
        peer_id, why = next((each for each in context.why_barred.items() if each[0] in failed), ("", ""))
        why = f" ({why if peer_id in why else f'{peer_id}: {why}'})" if why else ""
        cause, remedy = f"their servers just failed{why}", "try again in a moment"
    else:
        kind = NoRoom
        cause, remedy = (
            f"no server has room for {context.max_tokens} tokens or for one more session",
            "try again later, with fewer tokens, or with fewer requests at once",
        )
    return kind(f"blocks {told} are not available: {cause}", remedy=remedy, missing=missing)


def _has_any(record: ServeRecord, spans: Spans) -> bool:
    return any(record.start < high and low < record.end for low, high in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs in milliseconds: of entering the first server, of a link from one server (row) to the next (column), of a
    block, and of leaving the last server."""

    enter_P: Floats
    link_PP: Floats
    block_P: Floats
    leave_P: Floats


def cheapest_walk(covers_PB: Bools, costs: Costs) -> tuple[list[int], list[float]]:
    """Return for each block its server, and the cumulative cost including that block; the last cost includes leaving.

    Each block must be covered. With equal costs the server with the lowest index wins.
    """
    servers = [column.nonzero()[0] for column in np.ascontiguousarray(covers_PB.T)]
    now_P = servers[0]
    cost_P = costs.enter_P[now_P] + costs.block_P[now_P]
    came: list[NDArray[np.intp]] = []
    totals = [cost_P]
    for b in range(1, len(servers)):
        before_P, now_P = now_P, servers[b]
        step_PP = cost_P[:, None] + costs.link_PP[before_P[:, None], now_P]
        best_P = step_PP.argmin(axis=0)
        came.append(best_P)
        cost_P = step_PP[best_P, np.arange(len(now_P))] + costs.block_P[now_P]
        totals.append(cost_P)
    totals[-1] = cost_P = cost_P + costs.leave_P[now_P]
    at = int(cost_P.argmin())
    walk: list[int] = []
    done_ms: list[float] = []
    for b in range(len(servers) - 1, -1, -1):
        walk.append(int(servers[b][at]))
        done_ms.append(float(totals[b][at]))
        at = int(came[b - 1][at]) if b else 0
    return walk[::-1], done_ms[::-1]


def shortlist(covers_PB: Bools, order_P: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the servers that are among the first MAX_CANDIDATES in `order_P` for at least one block, in that order."""
    ordered_PB = covers_PB[order_P]
    rank_PB = ordered_PB.cumsum(axis=0, dtype=np.int16)
    return order_P[(ordered_PB & (rank_PB <= MAX_CANDIDATES)).any(axis=1)]


def runs(is_so_B: Sequence[bool] | NDArray[np.bool_], start: int = 0) -> Spans:
    """Return the half-open spans of the True entries, counted from `start`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(is_so_B, dtype=np.int8), [0]))))
    return tuple((start + int(low), start + int(high)) for low, high in zip(edges[::2], edges[1::2], strict=True))


def format_spans(spans: Collection[tuple[int, int]]) -> str:
    """Format spans as `4:8, 10:12`."""
    return ", ".join(f"{low}:{high}" for low, high in spans)
