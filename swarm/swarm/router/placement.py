"""Which span a node should take, and when it should move to another: what keeps the model whole comes first. Pure.

What helps a swarm most is `cover`'s. Here is who counts where: those who serve, those who join, and those who move.

Peers that decide in the same second agree without a leader. Each publishes a proposal, waits until the others' have
spread, and decides again, letting those with a lower hash choose first (`rank`). Since everyone computes everyone's
choice from the same proposals, all end with one plan. A move is announced before the new blocks are loaded. No move
counts on a block that another is about to leave, so two never leave a gap behind; of two that want the same, the one
with the lower hash goes. Each move leaves fewer blocks without a server, else fewer with only one, else a slowest block
that is a third faster, so a swarm whose nodes stay comes to rest. `volunteer` does the publishing and waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from swarm_protocol.records import ServeRecord

from swarm.router.cover import Cover, Floats, Health, runs
from swarm.router.routing import DEFAULT_RTT_MS, MIN_BLOCK_MS, RELAY_MS

MIN_GAIN = 0.75
"""A node moves, or takes fewer blocks than it could, only if throughput now / throughput then is below this."""

PROMPT_SHARE = 2.0
"""Prompt tokens for each token that is generated, in the requests that a swarm is prepared for."""

FEWER = (3 / 4, 1 / 2, 1 / 3, 1 / 4)
"""Parts of what fits that are tried as well: fewer blocks are computed more often."""

MAX_PROPOSALS = 12
"""Joiners before this one whose choices are followed. Of more, the rest settles by moving."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Take blocks `[start, end)`, because of `reason`."""

    start: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many blocks a peer can hold, how long one takes it for a token (see `work_ms`), and how far others are.

    `num_blocks` leave comfortable room for sessions, `max_blocks` the least: they are for when else a gap would stay.
    """

    peer_id: str
    num_blocks: int
    block_ms: float
    max_blocks: int = 0
    rtt_ms: Mapping[str, float] = field(default_factory=dict, hash=False)


def work_ms(decode_ms: float, prefill_ms: float) -> float:
    """What a token that is generated costs on one block, its share of the prompt included."""
    return max(decode_ms + PROMPT_SHARE * prefill_ms, MIN_BLOCK_MS)


def tokens_per_s(block_ms: float, num_blocks: int) -> float:
    """What each block of a span of `num_blocks` gets from a server."""
    return 1000.0 / (num_blocks * max(block_ms, MIN_BLOCK_MS))


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
    cover = _cover_of(servers, num_blocks, me)
    mine = rank(me.peer_id)
    before_me = {rank(p): p for p, record in servers.items() if p != me.peer_id and is_proposal(record)}
    for other in sorted(hash_ for hash_ in before_me if hash_ < mine)[:MAX_PROPOSALS]:
        record = servers[before_me[other]]
        joiner = _capacity(before_me[other], record)
        span = _best(cover, joiner, _rtts(servers, num_blocks, joiner))
        cover.add(span, tokens_per_s(joiner.block_ms, span[1] - span[0]))
    rtt_B = _rtts(servers, num_blocks, me)
    span = _best(cover, me, rtt_B)
    if _with(cover, me, span).num_missing:
        tight = _tight(cover, me, rtt_B)
        span = span if _with(cover, me, tight).num_missing else tight
    return Decision(start=span[0], end=span[1], reason=_reason(cover, span, me))


def choose_move(servers: Mapping[str, ServeRecord], num_blocks: int, me: Capacity, current: Span) -> Decision | None:
    """A better span than `current`, or None if there is none that is worth the move."""
    cover = _cover_of(servers, num_blocks, me)
    rtt_B = _rtts(servers, num_blocks, me)
    alone = only_here(servers, num_blocks, me.peer_id, current)
    keep = (alone[0][0], alone[-1][1]) if alone else (0, 0)
    now = _with(cover, me, current)
    spans = [_best(cover, me, rtt_B, keep)] if keep[1] - keep[0] <= min(me.num_blocks, num_blocks) else []
    if now.num_missing and keep[1] - keep[0] <= _most(cover, me):
        spans.append(_tight(cover, me, rtt_B, keep))
    for span in spans:
        if span != current and (reason := _worth(now, _with(cover, me, span), current, span)):
            return Decision(start=span[0], end=span[1], reason=reason)
    return None


def only_here(servers: Mapping[str, ServeRecord], num_blocks: int, peer_id: str, span: Span) -> tuple[Span, ...]:
    """The blocks of `span` that nobody but `peer_id` serves, or that all others are about to leave."""
    is_served_B = np.zeros(num_blocks, dtype=np.bool_)
    for other, record in servers.items():
        if other != peer_id and record.state == "serving" and not record.next_end:
            is_served_B[record.start : record.end] = True
    return runs(~is_served_B[slice(*span)], span[0])


# --- who counts where -----------------------------------------------------------------------------------------------


def _cover_of(servers: Mapping[str, ServeRecord], num_blocks: int, me: Capacity) -> Cover:
    """Everyone but me and the proposals. Who moves counts where it goes, but not for me if I am the first to choose."""
    cover = Cover(num_blocks)
    for peer_id, record in servers.items():
        if peer_id == me.peer_id or record.state == "draining" or is_proposal(record):
            continue
        span = record.start, record.end
        if record.next_end and rank(peer_id) < rank(me.peer_id):
            span = record.next_start, record.next_end
        block_ms = work_ms(record.decode_ms_per_block, record.prefill_ms_per_token)
        cover.add(span, tokens_per_s(block_ms, span[1] - span[0]))
    return cover


def _capacity(peer_id: str, record: ServeRecord) -> Capacity:
    return Capacity(
        peer_id=peer_id,
        num_blocks=record.end - record.start,
        block_ms=work_ms(record.decode_ms_per_block, record.prefill_ms_per_token),
        rtt_ms=record.rtt_ms,
    )


def _rtts(servers: Mapping[str, ServeRecord], num_blocks: int, me: Capacity) -> Floats:
    """For each block the round trip to the nearest server that has it."""
    rtt_B = np.full(num_blocks, DEFAULT_RTT_MS)
    for peer_id, rtt_ms in me.rtt_ms.items():
        record = servers.get(peer_id)
        if record is not None and peer_id != me.peer_id and record.state != "draining":
            part_B = rtt_B[record.start : record.end]
            np.minimum(part_B, rtt_ms + RELAY_MS * record.relayed, out=part_B)
    return rtt_B


# --- which window ---------------------------------------------------------------------------------------------------


def _with(cover: Cover, me: Capacity, span: Span) -> Health:
    return cover.health(beside=(span, tokens_per_s(me.block_ms, span[1] - span[0])))


def _most(cover: Cover, me: Capacity) -> int:
    return min(max(me.num_blocks, me.max_blocks, 1), cover.num_blocks)


def _tight(cover: Cover, me: Capacity, rtt_B: Floats, keep: Span = (0, 0)) -> Span:
    length = _most(cover, me)
    return cover.best_window(length, tokens_per_s(me.block_ms, length), rtt_B, keep)


def _best(cover: Cover, me: Capacity, rtt_B: Floats, keep: Span = (0, 0)) -> Span:
    """The best window of all blocks that fit, or of fewer where the slowest block gains much and no block loses."""
    full = min(max(me.num_blocks, 1), cover.num_blocks)
    best = cover.best_window(full, tokens_per_s(me.block_ms, full), rtt_B, keep)
    health = _with(cover, me, best)
    if health.num_missing or full == cover.num_blocks:
        return best
    for length in sorted({int(full * part) for part in FEWER} - {0, full}, reverse=True):
        if length < keep[1] - keep[0]:
            break
        span = cover.best_window(length, tokens_per_s(me.block_ms, length), rtt_B, keep)
        found = _with(cover, me, span)
        if found.num_missing or found.num_single > health.num_single:
            break
        if health.slowest < MIN_GAIN * found.slowest:
            best, health = span, found
    return best


# --- in words -------------------------------------------------------------------------------------------------------


def _worth(now: Health, then: Health, current: Span, span: Span) -> str:
    """Why to move, or empty. A second server for few blocks is not worth loading many."""
    if then.num_missing < now.num_missing:
        return f"blocks without a server go from {now.num_missing} to {then.num_missing}"
    num_secured = now.num_single - then.num_single
    if then.num_missing > now.num_missing or num_secured < 0:
        return ""
    if num_secured * 4 >= max(span[1] - span[0], current[1] - current[0]):
        return f"blocks with one server only go from {now.num_single} to {then.num_single}"
    if now.slowest < MIN_GAIN * then.slowest:
        return f"the slowest block goes from {now.slowest:.1f} to {then.slowest:.1f} tokens/s"
    return ""


def _reason(cover: Cover, span: Span, me: Capacity) -> str:
    start, end = span
    for num_servers, have in ((0, "no server"), (1, "one server only")):
        num_short = int((cover.servers_B == num_servers).sum())
        if num_short:
            num_helped = int((cover.servers_B[start:end] == num_servers).sum())
            return f"{num_short} of {cover.num_blocks} blocks have {have}, and {start}:{end} has {num_helped} of them"
    before, after = cover.health().slowest, _with(cover, me, span).slowest
    if after > before:
        return f"{start}:{end} raises the slowest block from {before:.1f} to {after:.1f} tokens/s"
    return f"{start}:{end} has the slowest blocks that fit here"
