"""A batch: the rows of many sequences, packed one after another, that one pass over a span's weights computes.

It is a value: the engine chooses it and `span` runs it. Legend of shapes: N rows of all pieces, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Want(IntEnum):
    """The outputs of a step that its caller needs."""

    NOTHING = 0
    LAST = 1
    ALL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """One piece of a batch: rows of one sequence.

    `position` is the position of its first row, so it is how many positions its pages hold already. `pages` are the
    ids of the pages that hold positions [0, position + num_tokens), in order; more of them do no harm.
    """

    num_tokens: int
    position: int
    pages: Sequence[int]
    want: Want


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows to run through blocks [start, end), which lie within the span's.

    `x` is int64 token ids [N] where `start` is the model's first block, else hidden states [N, H] of any float type.
    No two pieces may write the same page.
    """

    x: Tensor
    pieces: tuple[SequenceRows, ...]
    start: int
    end: int
