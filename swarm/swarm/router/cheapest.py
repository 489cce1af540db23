"""The cheapest walk over the blocks of a model, from server to server: numbers only, no records. Pure.

Every block is computed by one of the servers that have it, and going on from one block to the next costs the link
between their servers, nothing if it is the same one. This is Viterbi's algorithm, and exact.
Legend of shapes: B blocks, P servers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Milliseconds: to enter a server first, from one (row) to the next (column), of a block, to leave the last."""

    enter_P: Floats
    link_PP: Floats
    block_P: Floats
    leave_P: Floats


def cheapest_walk(covers_PB: Bools, costs: Costs) -> tuple[list[int], list[float]]:
    """For each block its server, and the cost up to and with it; the last entry is with leaving.

    Each block must be covered by somebody. Of equal costs the server with the lowest index wins.
    """
    servers = [column.nonzero()[0] for column in np.ascontiguousarray(covers_PB.T)]
    now_P = servers[0]
    cost_P = costs.enter_P[now_P] + costs.block_P[now_P]
    came: list[NDArray[np.intp]] = []
    totals = [cost_P]
    for b in range(1, len(servers)):
        before_P, now_P = now_P, servers[b]
        step_PP = cost_P[:, None] + costs.link_PP[before_P[:, None], now_P]
        best_P = step_PP.argmin(axis=0)
        came.append(best_P)
        cost_P = step_PP[best_P, np.arange(len(now_P))] + costs.block_P[now_P]
        totals.append(cost_P)
    totals[-1] = cost_P = cost_P + costs.leave_P[now_P]
    at = int(cost_P.argmin())
    walk: list[int] = []
    done_ms: list[float] = []
    for b in range(len(servers) - 1, -1, -1):
        walk.append(int(servers[b][at]))
        done_ms.append(float(totals[b][at]))
        at = int(came[b - 1][at]) if b else 0
    return walk[::-1], done_ms[::-1]


def promising(covers_PB: Bools, order_P: NDArray[np.intp], num_each: int) -> NDArray[np.intp]:
    """The servers that are among the first `num_each` of a block's in `order_P`, for any block; in that order."""
    ordered_PB = covers_PB[order_P]
    rank_PB = ordered_PB.cumsum(axis=0, dtype=np.int16)
    return order_P[(ordered_PB & (rank_PB <= num_each)).any(axis=1)]
