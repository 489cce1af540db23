"""Which span a node should take: what keeps the model whole, then what makes its slowest block faster. Pure.

First every block gets a server, then every block a second one, since a block with one server dies with it. Beyond
that, a server with L blocks of t ms gives each of its blocks 1000/(L·t) tokens/s, and a model is as fast as its slowest
block (Petals, Borzunov et al. 2022, arXiv 2209.01188, section 3.2). Deviations: the second server, windows compared by
the whole swarm after the move, and intentions of peers who join at the same time.

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

from swarm.router.routing import MIN_BLOCK_MS

MIN_GAIN = 0.75
"""A node moves only if throughput now / throughput then is below this, so that small gains cause no churn."""

ENOUGH_SERVERS = 2
"""Of one block, before speed counts: the second takes over when the first is lost."""


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


class _Cover:
    """For each block how many servers it has and how many tokens a second they do together."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.servers_B = np.zeros(num_blocks, dtype=np.int64)
        self.throughput_B = np.zeros(num_blocks)

    def add(self, start: int, end: int, tokens_per_s: float) -> None:
        self.servers_B[start:end] += 1
        self.throughput_B[start:end] += tokens_per_s

    def best_window(self, capacity: Capacity) -> tuple[int, int]:
        """The window after which the blocks have the most servers, up to ENOUGH_SERVERS, and then the most throughput.

        Both are compared from the worst block up. The first of equal windows, so that everyone finds the same one.
        """
        length = min(max(capacity.num_blocks, 1), self.num_blocks)
        starts_W = np.arange(self.num_blocks - length + 1)[:, None]
        block_B = np.arange(self.num_blocks)
        inside_WB = (starts_W <= block_B) & (block_B < starts_W + length)
        servers_WB = np.sort(np.minimum(self.servers_B + inside_WB, ENOUGH_SERVERS), axis=1)
        after_WB = np.sort(self.throughput_B + inside_WB * tokens_per_s(capacity, self.num_blocks), axis=1)
        # sums of the same speeds in another order differ in the last digits, and must still tie
        keys_WB = np.concatenate([servers_WB, np.round(after_WB, 6)], axis=1)
        best = max(range(len(keys_WB)), key=lambda window: (keys_WB[window].tolist(), -window))
        return best, best + length


def choose_span(servers: Mapping[str, ServeRecord], num_blocks: int, me: Capacity) -> Decision:
    """My span, given what the others serve or intend. `servers` are of one revision; an entry of my own is ignored.

    Deterministic: equal views give equal plans, whoever computes them.
    """
    cover = _Cover(num_blocks)
    before_me: list[Capacity] = []
    for peer_id, record in servers.items():
        if peer_id == me.peer_id or record.state == "draining":
            continue
        capacity = _capacity(peer_id, record)
        if not is_proposal(record):
            cover.add(record.start, record.end, tokens_per_s(capacity, num_blocks))
        elif rank(peer_id) < rank(me.peer_id):
            before_me.append(capacity)
    for capacity in sorted(before_me, key=lambda capacity: rank(capacity.peer_id)):
        cover.add(*cover.best_window(capacity), tokens_per_s(capacity, num_blocks))
    start, end = cover.best_window(me)
    return Decision(start=start, end=end, reason=_reason(cover, start, end, me))


def choose_move(
    servers: Mapping[str, ServeRecord], num_blocks: int, me: Capacity, current: tuple[int, int]
) -> Decision | None:
    """A better span than `current`, or None if the gain is too small to be worth it.

    Raising the slowest block from nothing is always worth it, unless it opens a gap elsewhere.
    """
    better = choose_span(servers, num_blocks, me)
    if (better.start, better.end) == current:
        return None
    now = _slowest(servers, num_blocks, me, current)
    then = _slowest(servers, num_blocks, me, (better.start, better.end))
    if then <= 0 or now / then >= MIN_GAIN:
        return None
    reason = f"the slowest block goes from {now:.1f} to {then:.1f} tokens/s"
    return Decision(start=better.start, end=better.end, reason=reason)


def tokens_per_s(capacity: Capacity, num_blocks: int) -> float:
    """What each block of a span as long as `capacity` allows gets from it."""
    return 1000.0 / (min(capacity.num_blocks, num_blocks) * max(capacity.block_ms, MIN_BLOCK_MS))


def _capacity(peer_id: str, record: ServeRecord) -> Capacity:
    return Capacity(peer_id=peer_id, num_blocks=record.end - record.start, block_ms=record.decode_ms_per_block)


def _slowest(servers: Mapping[str, ServeRecord], num_blocks: int, me: Capacity, span: tuple[int, int]) -> float:
    """Tokens a second of the slowest block with me on `span`."""
    cover = _Cover(num_blocks)
    cover.add(*span, tokens_per_s(me, num_blocks))
    for peer_id, record in servers.items():
        if peer_id != me.peer_id and record.state != "draining":
            cover.add(record.start, record.end, tokens_per_s(_capacity(peer_id, record), num_blocks))
    return float(cover.throughput_B.min())


def _reason(cover: _Cover, start: int, end: int, me: Capacity) -> str:
    for num_servers, have in ((0, "no server"), (1, "one server only")):
        num_short = int((cover.servers_B == num_servers).sum())
        if num_short:
            num_helped = int((cover.servers_B[start:end] == num_servers).sum())
            return (
                f"{num_short} of {cover.num_blocks} blocks have {have}, and [{start}, {end}) has {num_helped} of them"
            )
    before = float(cover.throughput_B.min())
    cover.add(start, end, tokens_per_s(me, cover.num_blocks))
    after = float(cover.throughput_B.min())
    if after > before:
        return f"[{start}, {end}) raises the slowest block from {before:.1f} to {after:.1f} tokens/s"
    return f"[{start}, {end}) has the slowest blocks that fit here"
