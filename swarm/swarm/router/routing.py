"""Which servers together answer for a model: the cheapest chain over (peer, block). Pure; keeps no state.

A hop is charged its round trip and every block it computes, and a block costs more where others wait and where the
cache is nearly full. Charging each block and not each node is what makes 20+20 beat 38+2.

Leaves to `session` what to do when a chain breaks, and to the client what it knows of links and of its own load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from swarm_protocol.errors import SessionError
from swarm_protocol.records import ServeRecord

DEFAULT_RTT_MS = 50.0
"""A link not yet measured counts as one across a continent: neither shunned nor preferred to a measured fibre."""

HOP_OVERHEAD_MS = 1.0
"""Wire and scheduling of one hop, so that a chain of fewer servers wins where links cost nothing."""

MIN_BLOCK_MS = 0.01
"""No block is faster than this, whatever a peer claims."""


class NoChain(SessionError):
    """`missing` are the spans of blocks that nobody can serve now."""

    def __init__(self, message: str, *, remedy: str, missing: tuple[tuple[int, int], ...]) -> None:
        super().__init__(message, remedy=remedy)
        self.missing = missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Blocks `[start, end)` on one peer."""

    peer_id: str
    start: int
    end: int
    cost_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Hops that cover the blocks asked for without gap or overlap; `cost_ms` is the expected time of one token."""

    hops: tuple[Hop, ...]
    cost_ms: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What the asking client knows: links, its own open sessions by peer, and whom to avoid for now.

    `salt` decides between chains of equal cost, so that clients with different salts spread over them.
    """

    rtt_ms: Mapping[str, float]
    load: Mapping[str, int]
    avoid: Collection[str] = ()
    max_tokens: int = 1
    salt: str = ""


def find_chain(servers: Mapping[str, ServeRecord], start: int, end: int, outlook: Outlook) -> Chain:
    """The cheapest chain for blocks `[start, end)`; a server may be used for a part of its span.

    `servers` are of one revision. Considers those in state "serving", with cache room, and not avoided. Raises NoChain.
    """
    usable = [
        (peer_id, record)
        for peer_id, record in servers.items()
        if record.state == "serving" and record.free_kv_tokens >= outlook.max_tokens and peer_id not in outlook.avoid
    ]
    usable.sort(key=lambda item: hashlib.blake2b((outlook.salt + item[0]).encode(), digest_size=8).digest())
    entry_P, block_P = _costs(usable, outlook)
    start_P = np.array([record.start for _, record in usable], dtype=np.int64)
    end_P = np.array([record.end for _, record in usable], dtype=np.int64)
    num_blocks = end - start
    covers_BP = (start_P <= (block_B := np.arange(start, end)[:, None])) & (block_B < end_P)
    if missing := _runs(np.logical_not(covers_BP.any(axis=1)), start):
        raise _no_chain(servers, missing, outlook)

    # done_B[b]: cheapest way to have the first b blocks computed. inside_P: the same, with the last one on that peer.
    done_B = np.zeros(num_blocks + 1)
    last_B = [(0, 0)] * (num_blocks + 1)
    inside_P = np.full(len(usable), np.inf)
    entered_P = np.zeros(len(usable), dtype=np.int64)
    for b in range(num_blocks):
        fresh_P = done_B[b] + entry_P
        entered_P = np.where(fresh_P < inside_P, b, entered_P)
        inside_P = np.where(covers_BP[b], np.minimum(fresh_P, inside_P) + block_P, np.inf)
        peer = int(inside_P.argmin())
        done_B[b + 1] = inside_P[peer]
        last_B[b + 1] = (peer, int(entered_P[peer]))

    hops: list[Hop] = []
    b = num_blocks
    while b > 0:
        peer, since = last_B[b]
        cost_ms = float(done_B[b] - done_B[since])
        hops.append(Hop(peer_id=usable[peer][0], start=start + since, end=start + b, cost_ms=cost_ms))
        b = since
    hops.reverse()
    total_ms = float(done_B[num_blocks])
    reason = f"{total_ms:.1f} ms a token over {len(hops)} of {len(usable)} usable servers"
    return Chain(hops=tuple(hops), cost_ms=total_ms, reason=reason)


def missing_spans(servers: Mapping[str, ServeRecord], num_blocks: int) -> tuple[tuple[int, int], ...]:
    """The blocks that nobody is serving."""
    is_missing_B = np.ones(num_blocks, dtype=np.bool_)
    for record in servers.values():
        if record.state == "serving":
            is_missing_B[record.start : record.end] = False
    return _runs(is_missing_B, 0)


def best_revision(servers: Mapping[str, ServeRecord]) -> dict[str, ServeRecord]:
    """The servers of one revision: the one with the fewest blocks missing, then with the most servers.

    Revisions are different weights and never share a chain. Empty if there are no servers.
    """
    groups: dict[tuple[str, int], dict[str, ServeRecord]] = {}
    for peer_id, record in servers.items():
        groups.setdefault((record.revision, record.num_blocks), {})[peer_id] = record

    def merit(key: tuple[str, int]) -> tuple[int, int, str]:
        num_missing = sum(high - low for low, high in missing_spans(groups[key], key[1]))
        return -num_missing, len(groups[key]), key[0]

    return groups[max(groups, key=merit)] if groups else {}


def _costs(usable: list[tuple[str, ServeRecord]], outlook: Outlook) -> tuple[np.ndarray, np.ndarray]:
    """For each server, milliseconds to enter it and milliseconds a block."""
    entry, block = [], []
    for peer_id, record in usable:
        waiting = max(record.queue_depth, outlook.load.get(peer_id, 0))
        room = outlook.max_tokens / record.free_kv_tokens
        entry.append(outlook.rtt_ms.get(peer_id, DEFAULT_RTT_MS) + HOP_OVERHEAD_MS)
        block.append(max(record.decode_ms_per_block, MIN_BLOCK_MS) * (1 + waiting + room))
    return np.array(entry, dtype=np.float64), np.array(block, dtype=np.float64)


def _runs(missing_B: np.ndarray, start: int) -> tuple[tuple[int, int], ...]:
    """Half-open spans of the True entries, counted from `start`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], missing_B.astype(np.int8), [0]))))
    return tuple((start + int(low), start + int(high)) for low, high in zip(edges[::2], edges[1::2], strict=True))


def _no_chain(servers: Mapping[str, ServeRecord], missing: tuple[tuple[int, int], ...], outlook: Outlook) -> NoChain:
    low, high = missing[0]
    candidates = {p: r for p, r in servers.items() if r.start < high and low < r.end and r.state == "serving"}
    if not candidates:
        cause, remedy = "nobody serves them", "wait for a server to join, or start one with --blocks"
    elif all(peer_id in outlook.avoid for peer_id in candidates):
        cause, remedy = "their servers just failed", "try again in a moment"
    else:
        cause, remedy = (
            f"no server has cache room for {outlook.max_tokens} tokens",
            "try again later, or with fewer tokens",
        )
    return NoChain(f"blocks {format_spans(missing)} are not available: {cause}", remedy=remedy, missing=missing)


def format_spans(spans: Collection[tuple[int, int]]) -> str:
    """`[4, 8), [10, 12)`"""
    return ", ".join(f"[{low}, {high})" for low, high in spans)
