"""What one pass over a span's weights computes: the rows of many seats, packed one after another.

Values only; `span` runs them and the engine chooses them. Legend of shapes: N rows of all slices, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from swarm_protocol import limits
from torch import Tensor

PAGE_TOKENS = limits.PAGE_TOKENS


class Want(IntEnum):
    """Which outputs of a step its caller needs."""

    NOTHING = 0
    LAST = 1
    ALL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One seat's part of a batch.

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
    No two slices may write the same page.
    """

    x: Tensor
    slices: tuple[Slice, ...]
    start: int
    end: int
