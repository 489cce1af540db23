"""One call on whole sequences: checked against the server's span, and cut into pieces that take about PIECE_MS. Pure.

A piece runs some blocks on some sequences. The smallest is one block on one sequence. A call is refused if that takes
over MAX_PIECE_MS, and for good only if it takes as long on the idle machine. If a call wants only some numbers of each
row of logits, the head runs in pieces of its own, on some positions each: all logits of a long prompt would take
gigabytes. `forward_server` runs the pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from swarm_protocol.errors import PeerRefused, PeerViolation
from swarm_protocol.serving_messages import HEAD_PIECE_BYTES, Compute

from swarm.serving.model.span import Span
from swarm.serving.server.deployment import Deployment

PIECE_MS = 50.0
"""Target time of a piece: about that of a token's pass on a volunteer's machine, so that sessions get every other
pass."""

MAX_PIECE_MS = 1000.0

SLOW_RETRY_AFTER_S = 5.0
"""Seconds after which a call may be asked for again that only the server's other work makes too slow."""

MIN_POSITION_MS = 1e-6
"""Minimum time of a position, for clocks that are too coarse."""

BACKWARD_FACTOR = 3.0
"""Time of a backward pass in forward passes: the block is run again, and then each product with a weight is computed
once more for the gradient of its input."""

BLOCK_WEIGHTS = 12
"""A block has some 12 H^2 weights, and the head has H V. This estimates the time of the head, and of attention to long
sequences, before they have run."""

Direction: TypeAlias = Literal["forward", "backward"]


class ForwardPace:
    """Estimates the milliseconds of a position on one block, without its attention: at first from `forward_ms`, then
    as measured. It is good until `until_s` on the loop's clock. On the idle machine a position takes at most
    `idle_ms`."""

    def __init__(self, forward_ms: float, *, idle_ms: float = math.inf) -> None:
        self.until_s = math.inf
        self.ms = _by_direction(forward_ms)
        self.idle_ms = _by_direction(min(forward_ms, idle_ms))

    def took(self, direction: Direction, work: float, num_blocks: float, elapsed_ms: float) -> None:
        """Record that `work`, in positions, took `elapsed_ms` on `num_blocks`."""
        measured_ms = elapsed_ms / (work * num_blocks)
        self.ms[direction] = max(MIN_POSITION_MS, 0.8 * self.ms[direction] + 0.2 * measured_ms)


def _by_direction(forward_ms: float) -> dict[Direction, float]:
    forward_ms = max(forward_ms, MIN_POSITION_MS)
    return {"forward": forward_ms, "backward": BACKWARD_FACTOR * forward_ms}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCut:
    """A call cut into pieces. Each piece runs one of `spans`, the last of which includes the head, on
    `num_sequences`."""

    num_sequences: int
    spans: tuple[tuple[int, int], ...]


def cut_call(
    num_positions: int, start: int, end: int, *, head_blocks: float, block_ms: float, idle_ms: float
) -> ForwardCut:
    """Cut a call on sequences of `num_positions` into pieces. The head takes as long as `head_blocks` blocks, 0 without
    a head. A sequence takes `block_ms` on a block now, and `idle_ms` on the idle machine.

    Raises PeerRefused if one block takes too long, with `retry_after_s` if it would not on the idle machine.
    """
    if block_ms * max(1.0, head_blocks) > MAX_PIECE_MS:
        is_final = idle_ms * max(1.0, head_blocks) > MAX_PIECE_MS
        raise PeerRefused(
            f"a block takes {block_ms:.0f} ms for {num_positions} positions here"
            f"{'' if is_final else ' now'}, and others would wait for it",
            remedy="use shorter sequences" if is_final else "wait, or use shorter sequences",
            retry_after_s=0.0 if is_final else SLOW_RETRY_AFTER_S,
            lacks_room=True,
        )
    num_blocks = end - start
    num_fitting = PIECE_MS / block_ms
    whole = max(1.0, num_blocks + head_blocks)
    if num_fitting >= whole:
        return ForwardCut(num_sequences=int(num_fitting // whole), spans=((start, end),))
    each = max(1, int(num_fitting))
    return ForwardCut(num_sequences=1, spans=tuple((low, min(low + each, end)) for low in range(start, end, each)))


@dataclass(slots=True)
class ForwardCall:
    """A call that was checked against the span."""

    asked: Compute
    direction: Direction
    deployed: Deployment
    pace: ForwardPace
    cut: ForwardCut = field(init=False)

    def __post_init__(self) -> None:
        """Set `cut`. Raises PeerRefused or PeerViolation for what this server cannot compute."""
        asked, span = self.asked, self.span
        if asked.revision != self.deployed.loaded.revision:
            raise PeerRefused(f"this server has revision {self.deployed.loaded.revision}", remedy="look up its record")
        if not span.start <= asked.start <= asked.end <= span.end:
            raise PeerRefused(f"this server has blocks {span.start}:{span.end}", remedy="look up its record")
        if self.direction == "backward" and (asked.of_tokens or asked.chooses_logits or asked.num_last):
            raise PeerViolation("token ids and chosen logits have no gradient")
        if asked.has_targets and not self.has_head:
            raise PeerViolation("only the server of the model's last block has logits of targets")
        if not asked.end:  # only embeddings, which take hardly any time
            self.cut = ForwardCut(num_sequences=asked.num_sequences, spans=())
            return
        self.cut = cut_call(
            asked.num_positions,
            asked.start,
            asked.end,
            head_blocks=self.num_blocks(asked.end, asked.end),
            block_ms=self.sequence_work * self.pace.ms[self.direction],
            idle_ms=self.sequence_work * self.pace.idle_ms[self.direction],
        )

    @property
    def span(self) -> Span:
        return self.deployed.loaded.span

    @property
    def sequence_work(self) -> float:
        """The work of a sequence on a block, in positions without attention. Attention to half of N positions takes
        2 N H operations a position, and the block's weights two each."""
        num_positions = self.asked.num_positions
        return num_positions * (1 + num_positions / (BLOCK_WEIGHTS * self.span.hidden_size))

    @property
    def has_head(self) -> bool:
        return self.asked.head and self.asked.end == self.span.num_blocks

    @property
    def chooses_logits(self) -> bool:
        """Tell whether rows of logits are reduced to some numbers, in pieces of the head."""
        return self.has_head and self.asked.chooses_logits

    @property
    def head_blocks(self) -> float:
        """The time of the head in that of blocks."""
        return self.span.vocab_size / (BLOCK_WEIGHTS * self.span.hidden_size)

    @property
    def head_rows(self) -> int:
        """The rows of a piece of the head."""
        fitting = HEAD_PIECE_BYTES // (4 * self.span.vocab_size)
        return max(1, min(fitting, int(PIECE_MS / (self.head_blocks * self.pace.ms["forward"]))))

    def num_blocks(self, start: int, end: int) -> float:
        """Return the time of a piece that runs [start, end) in that of blocks. It includes the head, unless this has
        its own pieces."""
        with_head = self.has_head and end == self.asked.end and not self.chooses_logits
        return end - start + (self.head_blocks if with_head else 0.0)

    @property
    def answer_shape(self) -> tuple[int, int, int]:
        """The numbers of sequences, positions and columns of the forward output."""
        span = self.span
        return self.asked.answer_shape(span.vocab_size if self.has_head else span.hidden_size, has_logits=self.has_head)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors held for the call at a time, as fp32, without the memory that a running piece
        needs."""
        span, asked = self.span, self.asked
        hidden_size = span.hidden_size
        num_sequences, num_positions, num_columns = self.answer_shape
        if self.direction == "forward":
            head_bytes = 0
            if self.chooses_logits:
                # a piece's logits are held while some are chosen, beside the last block's output and the targets
                head_bytes = HEAD_PIECE_BYTES + asked.num_rows * (4 * hidden_size + 8 * asked.has_targets)
            return 4 * (asked.num_rows * hidden_size + num_sequences * num_positions * num_columns) + head_bytes
        row_bytes = 4 * (hidden_size + num_columns)
        kept_rows = (
            min(self.cut.num_sequences, self.asked.num_sequences) * self.asked.num_positions * len(self.cut.spans)
        )
        return self.asked.num_rows * (row_bytes + 4 * hidden_size) + kept_rows * 4 * hidden_size
