"""Which span a node should take: the one that most raises the throughput of the model's slowest block. Pure.

A server with L blocks of t ms gives each of its blocks 1000/(L·t) tokens/s, and a model is as fast as its slowest
block (Petals, Borzunov et al. 2022, arXiv 2209.01188, section 3.2; here windows are compared by the whole swarm after
the move, and intentions of peers who join at the same time are counted).

Peers that decide in the same second agree without a leader. Each publishes a proposal, waits until the others' have
spread, and decides again, letting those with a lower hash choose first (`rank`). Since everyone computes everyone's
choice from the same proposals, all end with one plan. `volunteer` does the publishing and waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from swarm_protocol.records import ServeRecord

MIN_GAIN = 0.75
"""A node moves only if throughput now / throughput then is below this, so that small gains cause no churn."""

MIN_BLOCK_MS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Take blocks `[start, end)`, because of `reason`."""

    start: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many blocks a peer can hold and how long one takes it for a token."""

    peer_id: str
    num_blocks: int
    block_ms: float


def rank(peer_id: str) -> str:
    """Peers that decide at once choose in this order. A hash, so that no one is always first by its name."""
    return hashlib.sha256(peer_id.encode()).hexdigest()


def is_proposal(record: ServeRecord) -> bool:
    """A joining peer that has reserved no cache room yet may still move; one that has, counts as if it served."""
    return record.state == "joining" and record.free_kv_tokens == 0


def choose_span(servers: Mapping[str, ServeRecord], num_blocks: int, me: Capacity) -> Decision:
    """My span, given what the others serve or intend. `servers` are of one revision; an entry of my own is ignored.

    Deterministic: equal views give equal plans, whoever computes them.
    """
    others = {peer_id: record for peer_id, record in servers.items() if peer_id != me.peer_id}
    throughput_B = np.zeros(num_blocks)
    before_me: list[Capacity] = []
    for peer_id, record in others.items():
        capacity = Capacity(peer_id=peer_id, num_blocks=record.end - record.start, block_ms=record.decode_ms_per_block)
        if record.state == "draining":
            continue
        if not is_proposal(record):
            throughput_B[record.start : record.end] += _tokens_per_s(capacity, num_blocks)
        elif rank(peer_id) < rank(me.peer_id):
            before_me.append(capacity)
    for capacity in sorted(before_me, key=lambda capacity: rank(capacity.peer_id)):
        start, end = _best_window(throughput_B, capacity)
        throughput_B[start:end] += _tokens_per_s(capacity, num_blocks)
    start, end = _best_window(throughput_B, me)
    return Decision(start=start, end=end, reason=_reason(throughput_B, start, end, me))


def choose_move(
    servers: Mapping[str, ServeRecord], num_blocks: int, me: Capacity, current: tuple[int, int]
) -> Decision | None:
    """A better span than `current`, or None if the gain is too small to be worth it.

    Raising the slowest block from nothing is always worth it, unless it opens a gap elsewhere.
    """
    others = {peer_id: record for peer_id, record in servers.items() if peer_id != me.peer_id}
    better = choose_span(others, num_blocks, me)
    if (better.start, better.end) == current:
        return None
    now = _slowest(others, num_blocks, me, current)
    then = _slowest(others, num_blocks, me, (better.start, better.end))
    if then <= 0 or now / then >= MIN_GAIN:
        return None
    reason = f"the slowest block goes from {now:.1f} to {then:.1f} tokens/s"
    return Decision(start=better.start, end=better.end, reason=reason)


def _slowest(others: Mapping[str, ServeRecord], num_blocks: int, me: Capacity, span: tuple[int, int]) -> float:
    throughput_B = np.zeros(num_blocks)
    for peer_id, record in others.items():
        if record.state != "draining":
            capacity = Capacity(
                peer_id=peer_id, num_blocks=record.end - record.start, block_ms=record.decode_ms_per_block
            )
            throughput_B[record.start : record.end] += _tokens_per_s(capacity, num_blocks)
    throughput_B[span[0] : span[1]] += _tokens_per_s(me, num_blocks)
    return float(throughput_B.min())


def _tokens_per_s(capacity: Capacity, num_blocks: int) -> float:
    return 1000.0 / (min(capacity.num_blocks, num_blocks) * max(capacity.block_ms, MIN_BLOCK_MS))


def _best_window(throughput_B: np.ndarray, capacity: Capacity) -> tuple[int, int]:
    """The window that leaves the blocks' throughputs, sorted from the slowest, lexicographically greatest.

    The first such window, so that everyone finds the same one.
    """
    num_blocks = len(throughput_B)
    length = min(max(capacity.num_blocks, 1), num_blocks)
    starts_W = np.arange(num_blocks - length + 1)[:, None]
    block_B = np.arange(num_blocks)
    inside_WB = (starts_W <= block_B) & (block_B < starts_W + length)
    after_WB = np.sort(throughput_B + inside_WB * _tokens_per_s(capacity, num_blocks), axis=1)
    # sums of the same speeds in another order differ in the last digits, and must still tie
    keys_WB = np.round(after_WB, 6)
    best = max(range(len(keys_WB)), key=lambda window: (keys_WB[window].tolist(), -window))
    return best, best + length


def _reason(throughput_B: np.ndarray, start: int, end: int, me: Capacity) -> str:
    num_unserved = int((throughput_B == 0).sum())
    if num_unserved:
        gained = int((throughput_B[start:end] == 0).sum())
        return (
            f"{num_unserved} of {len(throughput_B)} blocks have no server, and [{start}, {end}) covers {gained} of them"
        )
    before = float(throughput_B.min())
    after_B = throughput_B.copy()
    after_B[start:end] += _tokens_per_s(me, len(throughput_B))
    if after_B.min() > before:
        return f"[{start}, {end}) raises the slowest block from {before:.1f} to {after_B.min():.1f} tokens/s"
    slowest = float(throughput_B[start:end].min())
    return f"[{start}, {end}) has the slowest blocks that fit here, {slowest:.1f} tokens/s"
