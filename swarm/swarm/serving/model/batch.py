"""A batch: the rows of many sequences, one after another, which one pass over a span's weights computes.

A value that the engine makes and `span` runs. Shapes: N rows of all pieces, H hidden size.
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

    `position` is that of the first row, and so the number of positions that are already in the pages. `pages` are the
    ids of the pages for positions [0, position + num_tokens), in order; there may be more. The last `num_drafts` rows
    are guesses at the tokens after the first one.
    """

    num_tokens: int
    position: int
    pages: Sequence[int]
    want: Want
    num_drafts: int = 0


def is_decode(num_rows: int, num_drafts: int) -> bool:
    """Return whether rows are of one token, and perhaps of drafts after it."""
    return num_rows - num_drafts == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows to run through blocks [start, end) of a span.

    `x` is int64 token ids [N] if `start` is the model's first block, else hidden states [N, H] of any float type. No
    two pieces may write the same page.
    """

    x: Tensor
    pieces: tuple[SequenceRows, ...]
    start: int
    end: int
