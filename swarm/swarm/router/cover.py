"""How well the blocks of a model are covered, and which window of them a further server helps most. Pure numbers.

First every block gets a server, then every block a second one, since a block with one server dies with it. Beyond
that, a server of L blocks of t ms adds 1000/(L·t) tokens/s to each of its blocks, and a model is as fast as its slowest
block (Petals, Borzunov et al. 2022, arXiv 2209.01188, section 3.2). Deviations: the second server; speeds that differ
by less than a tenth count as equal, and then the links to the servers before and after decide.
Legend of shapes: B blocks, W windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = NDArray[np.intp]

ENOUGH_SERVERS = 2
"""Of one block, before speed counts: the second takes over when the first is lost."""

SAME_SPEED = 1.1
_LOWEST = 1e-9  # tokens/s: below any server's, whatever it claims


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Of a model: blocks with no server, blocks with one only, and tokens a second of its slowest block."""

    num_missing: int
    num_single: int
    slowest: float


class Cover:
    """For each block how many servers it has and how many tokens a second they do together."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.servers_B = np.zeros(num_blocks, dtype=np.int64)
        self.rate_B = np.zeros(num_blocks)

    def copy(self) -> Cover:
        twin = Cover(self.num_blocks)
        twin.servers_B, twin.rate_B = self.servers_B.copy(), self.rate_B.copy()
        return twin

    def add(self, span: tuple[int, int], tokens_per_s: float) -> None:
        self.servers_B[slice(*span)] += 1
        self.rate_B[slice(*span)] += tokens_per_s

    def health(self, *, beside: tuple[tuple[int, int], float] | None = None) -> Health:
        """As it is, or with one more server `beside`: its span and its tokens/s."""
        cover = self
        if beside is not None:
            cover = self.copy()
            cover.add(*beside)
        return Health(
            num_missing=int((cover.servers_B == 0).sum()),
            num_single=int((cover.servers_B == 1).sum()),
            slowest=float(cover.rate_B.min()),
        )

    def best_window(self, length: int, tokens_per_s: float, rtt_B: Floats, keep: tuple[int, int]) -> tuple[int, int]:
        """The window of `length` that helps most, of those that hold the blocks `keep` (empty: any).

        Compared from the worst block up, then by the round trips `rtt_B` to the nearest server of the blocks before and
        after, then by exact speed. The first of equal windows, so that everyone finds the same one.
        """
        starts_W = np.arange(self.num_blocks - length + 1)
        if keep[0] < keep[1]:
            starts_W = starts_W[(starts_W <= keep[0]) & (keep[1] <= starts_W + length)]
        starts_W = starts_W[_highest(self._coverage(starts_W, length))]
        block_B = np.arange(self.num_blocks)
        inside_WB = (starts_W[:, None] <= block_B) & (block_B < starts_W[:, None] + length)
        rate_WB = np.sort(self.rate_B + inside_WB * tokens_per_s, axis=1)
        rough_WB = np.rint(np.log(np.maximum(rate_WB, _LOWEST) / _LOWEST) / np.log(SAME_SPEED))
        kept = _highest(rough_WB)
        kept = kept[_highest(-np.round(_way(starts_W[kept], length, rtt_B))[:, None])]
        # sums of the same speeds in another order differ in the last digits, and must still tie
        best = int(starts_W[kept[_highest(np.round(rate_WB[kept], 6))[0]]])
        return best, best + length

    def _coverage(self, starts_W: Rows, length: int) -> NDArray[np.int64]:
        """How many blocks have servers, and then how many have enough, with the window: higher is better. [W, 2]"""
        none_B, one_B = self.servers_B == 0, self.servers_B == 1
        num_none_W = none_B.sum() - _within(none_B, starts_W, length)
        num_one_W = one_B.sum() - _within(one_B, starts_W, length) + _within(none_B, starts_W, length)
        return -np.stack([num_none_W, num_one_W], axis=1)


def _within(is_so_B: NDArray[np.bool_], starts_W: Rows, length: int) -> NDArray[np.int64]:
    total_B = np.concatenate(([0], np.cumsum(is_so_B)))
    found: NDArray[np.int64] = total_B[starts_W + length] - total_B[starts_W]
    return found


def _highest(keys: NDArray[np.int64] | Floats) -> Rows:
    """Indices of the rows that are highest, compared column by column."""
    rows: Rows = np.arange(len(keys))
    for column in range(keys.shape[1]):
        values = keys[rows, column]
        rows = rows[values == values.max()]
        if len(rows) == 1:
            break
    return rows


def _way(starts_W: Rows, length: int, rtt_B: Floats) -> Floats:
    """The mean round trip to the nearest neighbours of each window; the model's ends have one neighbour only."""
    ends_W = starts_W + length
    has_before_W, has_after_W = starts_W > 0, ends_W < len(rtt_B)
    before_W = np.where(has_before_W, rtt_B[starts_W - 1], 0.0)
    after_W = np.where(has_after_W, rtt_B[np.minimum(ends_W, len(rtt_B) - 1)], 0.0)
    mean_W: Floats = (before_W + after_W) / np.maximum(has_before_W.astype(int) + has_after_W, 1)
    return mean_W


def runs(is_so_B: Sequence[bool] | NDArray[np.bool_], start: int = 0) -> tuple[tuple[int, int], ...]:
    """Half-open spans of the True entries, counted from `start`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(is_so_B, dtype=np.int8), [0]))))
    return tuple((start + int(low), start + int(high)) for low, high in zip(edges[::2], edges[1::2], strict=True))
