"""How a call on whole sequences is cut, so that others' tokens come between its pieces. Pure.

A piece runs some blocks on some sequences. It takes about PIECE_MS, or one block on one sequence where that is longer;
a sequence for which a block takes over MAX_PIECE_MS is refused. A token of others waits for one piece at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from swarm_protocol.errors import PeerRefused

PIECE_MS = 50.0
"""About the time of a token's pass on a volunteer's machine: who decodes beside a call gets every other pass."""

MAX_PIECE_MS = 1000.0

MIN_POSITION_MS = 1e-6
"""Of a clock that is too coarse."""

BACKWARD_FACTOR = 3.0
"""A block is run again, and then each product with a weight once more for the gradient of its input."""

Direction: TypeAlias = Literal["forward", "backward"]


class Pace:
    """Milliseconds that a position takes on one block; at first from `forward_ms`, then as measured."""

    def __init__(self, forward_ms: float) -> None:
        forward_ms = max(forward_ms, MIN_POSITION_MS)
        self.ms: dict[Direction, float] = {"forward": forward_ms, "backward": BACKWARD_FACTOR * forward_ms}

    def took(self, direction: Direction, num_positions: int, num_blocks: float, elapsed_ms: float) -> None:
        measured_ms = elapsed_ms / (num_positions * num_blocks)
        self.ms[direction] = max(MIN_POSITION_MS, 0.8 * self.ms[direction] + 0.2 * measured_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Each piece runs one of `spans`, of which the last has the head, on `num_sequences`."""

    num_sequences: int
    spans: tuple[tuple[int, int], ...]


def cut_call(num_positions: int, start: int, end: int, *, head_blocks: float, position_ms: float) -> Cut:
    """For sequences of `num_positions`, when the head takes as long as `head_blocks` blocks (0: without it).

    Raises PeerRefused if one block takes too long.
    """
    block_ms = num_positions * position_ms
    if block_ms * max(1.0, head_blocks) > MAX_PIECE_MS:
        raise PeerRefused(
            f"a block takes {block_ms:.0f} ms for {num_positions} positions here, and others would wait for it",
            remedy="use shorter sequences",
        )
    num_blocks = end - start
    num_fitting = PIECE_MS / block_ms
    whole = max(1.0, num_blocks + head_blocks)
    if num_fitting >= whole:
        return Cut(num_sequences=int(num_fitting // whole), spans=((start, end),))
    each = max(1, int(num_fitting))
    return Cut(num_sequences=1, spans=tuple((low, min(low + each, end)) for low in range(start, end, each)))
