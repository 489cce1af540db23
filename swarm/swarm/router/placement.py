"""Chooses the span that a node takes, and when it moves to another one. Keeping the model whole comes first. The module
is pure.

First every block gets a server, then every block a second one, since a block with only one server is lost with it.
Beyond that, a server of L blocks of t ms adds 1000/(L·t) tokens/s to each of its blocks, and a model is as fast as its
slowest block (Petals, Borzunov et al. 2022, arXiv 2209.01188, section 3.2). Deviations from the paper: the second
server; speeds that differ by less than about a tenth count as equal, and then the round trips to the servers before and
after decide. A server with a limited upload adds no more than its upload carries, unless its span ends with the last
block, since its server sends tokens instead of hidden states.

Peers that join in the same second agree without a leader. Each publishes its capacity as a proposal, waits until the
others' have spread, and decides, letting those with a lower hash choose first (`turn_hash`). Since every peer computes
all choices from the same proposals, all arrive at one plan. A move is announced before the new blocks are loaded. No
move relies on a block that another node is about to leave, so two nodes never leave a gap behind. If two nodes want the
same move, the one with the lower hash makes it. If they announce it before they see each other, and only they serve
their blocks, both stay, and the one that searches first the next time makes it. Each move leaves fewer blocks without a
server, else fewer with only one, else makes the slowest block a third faster. So the moves end while no node joins or
leaves. `swarm.serving.server.span_placer` publishes and waits.

Shapes: B blocks, W windows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from swarm_protocol.records import ServeRecord

from swarm.router.routing import DEFAULT_RTT_MS, MIN_BLOCK_MS, RELAY_MS, Floats, runs

Indices = NDArray[np.intp]

MIN_GAIN = 0.75
"""A node moves, or takes fewer blocks than it could, only if the slowest block's present speed is below this fraction
of its speed afterwards."""

PROMPT_SHARE = 2.0
"""Prompt tokens for each generated token in the expected requests."""

FEWER = (3 / 4, 1 / 2, 1 / 3, 1 / 4)
"""Smaller spans that a server also tries, as fractions of the blocks that fit: with fewer blocks it runs each of them
more often."""

MAX_PROPOSALS = 128
"""Maximum joining peers, of those that choose before this node, whose choices it computes, at one to three
milliseconds each. Later moves do not correct for the others: a single move hardly helps where several are needed."""

Span = tuple[int, int]

SAME_SPEED = 1.1
_LOWEST = 1e-9  # tokens/s: below the speed of any server, whatever the server claims


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageSummary:
    """A summary of coverage: the numbers of blocks with no server and with only one, and the tokens/s of the slowest
    block."""

    num_missing: int
    num_single: int
    slowest: float


class Coverage:
    """The number of servers of each block, and their total tokens/s."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.servers_B = np.zeros(num_blocks, dtype=np.int64)
        self.rate_B = np.zeros(num_blocks)

    def copy(self) -> Coverage:
        twin = Coverage(self.num_blocks)
        twin.servers_B, twin.rate_B = self.servers_B.copy(), self.rate_B.copy()
        return twin

    def add(self, span: tuple[int, int], tokens_per_s: float) -> None:
        self.servers_B[slice(*span)] += 1
        self.rate_B[slice(*span)] += tokens_per_s

    def health(self, *, beside: tuple[tuple[int, int], float] | None = None) -> CoverageSummary:
        """Summarize the coverage, with one more server if `beside` gives a span and its tokens/s."""
        cover = self
        if beside is not None:
            cover = self.copy()
            cover.add(*beside)
        return CoverageSummary(
            num_missing=int((cover.servers_B == 0).sum()),
            num_single=int((cover.servers_B == 1).sum()),
            slowest=float(cover.rate_B.min()),
        )

    def best_window(self, length: int, me: Capacity, rtt_B: Floats, keep: tuple[int, int]) -> tuple[int, int]:
        """Return the window of `length` blocks in which `me` helps most, among the windows that contain the span
        `keep`, which may be empty.

        Windows are compared from the worst block up, then by the round trips `rtt_B` to the nearest server of the
        blocks before and after, then by exact speed. The first of equal windows wins, so that every node finds the same
        one.
        """
        starts_W = np.arange(self.num_blocks - length + 1)
        if keep[0] < keep[1]:
            starts_W = starts_W[(starts_W <= keep[0]) & (keep[1] <= starts_W + length)]
        starts_W = starts_W[_highest(self._coverage(starts_W, length))]
        block_B = np.arange(self.num_blocks)
        inside_WB = (starts_W[:, None] <= block_B) & (block_B < starts_W[:, None] + length)
        is_last_W = starts_W + length == self.num_blocks
        rate_W = np.where(is_last_W, *(tokens_per_s(me.block_ms, length, send_ms) for send_ms in (0.0, me.send_ms)))
        rate_WB = np.sort(self.rate_B + inside_WB * rate_W[:, None], axis=1)
        rough_WB = np.rint(np.log(np.maximum(rate_WB, _LOWEST) / _LOWEST) / np.log(SAME_SPEED))
        kept = _highest(rough_WB)
        kept = kept[_highest(-np.round(_neighbour_rtts(starts_W[kept], length, rtt_B))[:, None])]
        # sums of the same speeds in another order differ in the last digits, but must compare as equal
        best = int(starts_W[kept[_highest(np.round(rate_WB[kept], 6))[0]]])
        return best, best + length

    def _coverage(self, starts_W: Indices, length: int) -> NDArray[np.int64]:
        """Return for each window the negated numbers of blocks without a server and with only one [W, 2]."""
        none_B, one_B = self.servers_B == 0, self.servers_B == 1
        num_none_W = none_B.sum() - _within(none_B, starts_W, length)
        num_one_W = one_B.sum() - _within(one_B, starts_W, length) + _within(none_B, starts_W, length)
        return -np.stack([num_none_W, num_one_W], axis=1)


def _within(is_so_B: NDArray[np.bool_], starts_W: Indices, length: int) -> NDArray[np.int64]:
    total_B = np.concatenate(([0], np.cumsum(is_so_B)))
    found: NDArray[np.int64] = total_B[starts_W + length] - total_B[starts_W]
    return found


def _highest(keys: NDArray[np.int64] | Floats) -> Indices:
    """Return the indices of the lexicographically highest rows of `keys`."""
    rows: Indices = np.arange(len(keys))
    while (differs := (keys[rows] != keys[rows[0]]).any(axis=0)).any():
        values = keys[rows, differs.argmax()]
        rows = rows[values == values.max()]
    return rows


def _neighbour_rtts(starts_W: Indices, length: int, rtt_B: Floats) -> Floats:
    """Return the mean round trip from each window to its nearest neighbours before and after [W]; at an end of the
    model there is only one neighbour."""
    ends_W = starts_W + length
    has_before_W, has_after_W = starts_W > 0, ends_W < len(rtt_B)
    before_W = np.where(has_before_W, rtt_B[starts_W - 1], 0.0)
    after_W = np.where(has_after_W, rtt_B[np.minimum(ends_W, len(rtt_B) - 1)], 0.0)
    mean_W: Floats = (before_W + after_W) / np.maximum(has_before_W.astype(int) + has_after_W, 1)
    return mean_W


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """The decision to take blocks `[start, end)`, with its `reason`."""

    start: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of a peer: how many blocks it can hold, its time of a block for a token (see `work_ms`), and its
    round trips to others.

    `num_blocks` leave room for many sessions. `max_blocks` leave the minimum, and are taken only to close a gap that
    would otherwise remain. `send_ms` is the `send_ms_per_token` of a ServeRecord without the last block.
    """

    peer_id: str
    num_blocks: int
    block_ms: float
    max_blocks: int = 0
    rtt_ms: Mapping[str, float] = field(default_factory=dict, hash=False)
    send_ms: float = 0.0

    def tokens_per_s(self, span: Span, num_blocks: int) -> float:
        """Return the tokens/s that the peer adds to each block of `span`."""
        send_ms = 0.0 if span[1] == num_blocks else self.send_ms
        return tokens_per_s(self.block_ms, span[1] - span[0], send_ms)


def work_ms(decode_ms: float, prefill_ms: float) -> float:
    """Return the cost of a generated token on one block, with its share of the prompt."""
    return max(decode_ms + PROMPT_SHARE * prefill_ms, MIN_BLOCK_MS)


def tokens_per_s(block_ms: float, num_blocks: int, send_ms: float = 0.0) -> float:
    """Return the tokens/s that a server adds to each block of a span of `num_blocks`, if its upload takes `send_ms` for
    a token. The server sends while it computes the next tokens, and sends the hidden states of prompts, too."""
    return 1000.0 / max(num_blocks * max(block_ms, MIN_BLOCK_MS), (1 + PROMPT_SHARE) * send_ms)


def turn_hash(peer_id: str) -> str:
    """Return the key that orders peers which decide at the same time: the SHA-256 digest of the peer id, in hex."""
    return hashlib.sha256(peer_id.encode()).hexdigest()


def is_proposal(record: ServeRecord) -> bool:
    """Return whether a record is only a proposal: its peer is joining and has reserved no cache room yet."""
    return record.state == "joining" and record.free_kv_tokens == 0


def choose_span(servers: Mapping[str, ServeRecord], num_blocks: int, me: Capacity) -> PlacementDecision:
    """Return the span for `me`, given what other peers serve or propose.

    `servers` are of one revision; an entry of `me` is ignored. Equal views give equal plans on every node.
    """
    cover = _cover_of(servers, num_blocks, me, is_joining=True)
    mine = turn_hash(me.peer_id)
    before_me = {turn_hash(p): p for p, record in servers.items() if p != me.peer_id and is_proposal(record)}
    for other in sorted(hash_ for hash_ in before_me if hash_ < mine)[:MAX_PROPOSALS]:
        record = servers[before_me[other]]
        joiner = _capacity(before_me[other], record)
        span = _joining_span(cover, joiner, _rtts(servers, num_blocks, joiner))
        cover.add(span, joiner.tokens_per_s(span, num_blocks))
    span = _joining_span(cover, me, _rtts(servers, num_blocks, me))
    return PlacementDecision(start=span[0], end=span[1], reason=_reason(cover, span, me))


def proposed_span(first_choice: PlacementDecision, num_blocks: int, me: Capacity) -> Span:
    """Return the span of a proposal, near the first choice. It is `me.num_blocks` long, since others compute the choice
    of `me` from that; a choice may be shorter or longer."""
    start = min(first_choice.start, num_blocks - me.num_blocks)
    return start, start + me.num_blocks


def choose_move(
    servers: Mapping[str, ServeRecord], num_blocks: int, me: Capacity, current: Span
) -> PlacementDecision | None:
    """Return a better span than `current`, or None if no move is worth it."""
    cover = _cover_of(servers, num_blocks, me, is_joining=False)
    rtt_B = _rtts(servers, num_blocks, me)
    alone = sole_spans(servers, num_blocks, me.peer_id, current)
    keep = (alone[0][0], alone[-1][1]) if alone else (0, 0)
    now = _health_with(cover, me, current)
    spans = [_best_span(cover, me, rtt_B, keep)] if keep[1] - keep[0] <= min(me.num_blocks, num_blocks) else []
    if now.num_missing and keep[1] - keep[0] <= _most_blocks(cover, me):
        spans.append(_largest_span(cover, me, rtt_B, keep))
    for span in spans:
        if span != current and (reason := _reason_to_move(now, _health_with(cover, me, span), current, span)):
            return PlacementDecision(start=span[0], end=span[1], reason=reason)
    return None


def sole_spans(servers: Mapping[str, ServeRecord], num_blocks: int, peer_id: str, span: Span) -> tuple[Span, ...]:
    """Return the blocks of `span` that no other peer serves, or that all others are about to leave."""
    is_served_B = np.zeros(num_blocks, dtype=np.bool_)
    for other, record in servers.items():
        if other != peer_id and record.state == "serving" and not record.next_end:
            is_served_B[record.start : record.end] = True
    return runs(~is_served_B[slice(*span)], span[0])


def _cover_of(servers: Mapping[str, ServeRecord], num_blocks: int, me: Capacity, *, is_joining: bool) -> Coverage:
    """Return the coverage by all peers except `me`, those that are draining, and those with proposals.

    A peer that moves counts at its new span, or at its present one if `me` is a server that chooses before it. Joining
    peers all count it at the same span, since they compute each other's choices.
    """
    cover = Coverage(num_blocks)
    for peer_id, record in servers.items():
        if peer_id == me.peer_id or record.state == "draining" or is_proposal(record):
            continue
        span = record.start, record.end
        if record.next_end and (is_joining or turn_hash(peer_id) < turn_hash(me.peer_id)):
            span = record.next_start, record.next_end
        block_ms = work_ms(record.decode_ms_per_block, record.prefill_ms_per_token)
        cover.add(span, tokens_per_s(block_ms, span[1] - span[0], record.send_ms_per_token))
    return cover


def _capacity(peer_id: str, record: ServeRecord) -> Capacity:
    return Capacity(
        peer_id=peer_id,
        num_blocks=record.end - record.start,
        max_blocks=record.max_blocks,
        block_ms=work_ms(record.decode_ms_per_block, record.prefill_ms_per_token),
        rtt_ms=record.rtt_ms,
        send_ms=record.send_ms_per_token,
    )


def _rtts(servers: Mapping[str, ServeRecord], num_blocks: int, me: Capacity) -> Floats:
    """Return for each block the round trip to the nearest server that has it [B], or DEFAULT_RTT_MS if none is known.
    Proposals do not count: what their peers will serve depends on what `me` takes."""
    rtt_B = np.full(num_blocks, DEFAULT_RTT_MS)
    for peer_id, rtt_ms in me.rtt_ms.items():
        record = servers.get(peer_id)
        if record is None or peer_id == me.peer_id or record.state == "draining" or is_proposal(record):
            continue
        part_B = rtt_B[record.start : record.end]
        np.minimum(part_B, rtt_ms + RELAY_MS * record.relayed, out=part_B)
    return rtt_B


def _health_with(cover: Coverage, me: Capacity, span: Span) -> CoverageSummary:
    return cover.health(beside=(span, me.tokens_per_s(span, cover.num_blocks)))


def _most_blocks(cover: Coverage, me: Capacity) -> int:
    return min(max(me.num_blocks, me.max_blocks, 1), cover.num_blocks)


def _largest_span(cover: Coverage, me: Capacity, rtt_B: Floats, keep: Span = (0, 0)) -> Span:
    return cover.best_window(_most_blocks(cover, me), me, rtt_B, keep)


def _joining_span(cover: Coverage, joiner: Capacity, rtt_B: Floats) -> Span:
    """Return the span for a joining peer: the best one, or the largest if only that one leaves no block without a
    server."""
    best = _best_span(cover, joiner, rtt_B)
    if not _health_with(cover, joiner, best).num_missing:
        return best
    largest = _largest_span(cover, joiner, rtt_B)
    return best if _health_with(cover, joiner, largest).num_missing else largest


def _best_span(cover: Coverage, me: Capacity, rtt_B: Floats, keep: Span = (0, 0)) -> Span:
    """Return the best window with as many blocks as fit, or with fewer if the slowest block then gains much and no
    block loses."""
    full = min(max(me.num_blocks, 1), cover.num_blocks)
    best = cover.best_window(full, me, rtt_B, keep)
    health = _health_with(cover, me, best)
    if health.num_missing or full == cover.num_blocks:
        return best
    for length in sorted({int(full * part) for part in FEWER} - {0, full}, reverse=True):
        if length < keep[1] - keep[0]:
            break
        span = cover.best_window(length, me, rtt_B, keep)
        found = _health_with(cover, me, span)
        if found.num_missing or found.num_single > health.num_single:
            break
        if health.slowest < MIN_GAIN * found.slowest:
            best, health = span, found
    return best


def _reason_to_move(now: CoverageSummary, then: CoverageSummary, current: Span, span: Span) -> str:
    """Return the reason to move, or an empty text. Giving a few blocks a second server is not worth loading many."""
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


def _reason(cover: Coverage, span: Span, me: Capacity) -> str:
    start, end = span
    for num_servers, have in ((0, "no server"), (1, "one server only")):
        num_short = int((cover.servers_B == num_servers).sum())
        if num_short:
            num_helped = int((cover.servers_B[start:end] == num_servers).sum())
            return f"{num_short} of {cover.num_blocks} blocks have {have}, and {start}:{end} has {num_helped} of them"
    before, after = cover.health().slowest, _health_with(cover, me, span).slowest
    if after > before:
        return f"{start}:{end} raises the slowest block from {before:.1f} to {after:.1f} tokens/s"
    return f"{start}:{end} has the slowest blocks that fit here"
