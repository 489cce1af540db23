"""Pre-aggregation for unequal data: members' slices are mixed with each other before an aggregator sees them.

Where members train on unlike data, honest slices lie far apart. An aggregator that looks for agreement then leaves
honest slices out, or follows liars that hide among them. Means of several slices lie closer together. A mixing decides
which slices go into which mean, from the weights and the scalar products of the slices of one leaf; the loops over
values are in `leaf_aggregation`. The decision is a pure function of what an auditor of the leaf has, with the same bits
on every machine. How much is mixed follows from the group and from `liar_share`, the largest share of the group's
weight that liars may have.

Shapes: L leaves, M members, K mixed slices.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from swarm.trust.kernels import Doubles, Whole, matrix_product, squared_distances

MOST_LIARS = 0.49
"""The largest `liar_share`: no rule is robust against liars with half of the weight or more."""
DEFAULT_LIAR_SHARE = 0.34
"""The default of `liar_share`. Votes hold while fewer than a third of the members are liars, so a smaller bound would
be the weaker of the two. With 0.34, one of three members can be a liar, too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedSlices:
    """The result of a mixing: mixed slice k of a leaf is the sum over members m of `shares_LKM` * slice m, where the
    shares of a mixed slice add up to 1. `weight_LK` are the weights of the mixed slices."""

    shares_LKM: Doubles
    weight_LK: Whole

    def products(self, products_LMM: Doubles) -> Doubles:
        """Return the scalar products of the mixed slices [L, K, K], from those of the slices."""
        half_LKM = matrix_product(self.shares_LKM, products_LMM)
        x_LKK = matrix_product(half_LKM, self.shares_LKM.transpose(0, 2, 1))
        return (x_LKK + x_LKK.transpose(0, 2, 1)) / 2

    def coefficients(self, coefficients_LK: Doubles) -> Doubles:
        """Return the coefficient of each slice [L, M], from that of each mixed slice."""
        return matrix_product(coefficients_LK[:, None, :], self.shares_LKM)[:, 0]


class Mixing(ABC):
    """A rule by which slices are mixed."""

    name: ClassVar[str]
    needs_products: ClassVar[bool]
    """True if `mix` reads the slices' scalar products. If not, `products_LMM` may have any values."""

    @abstractmethod
    def mix(self, weights: Sequence[int], products_LMM: Doubles, beacons: Sequence[bytes], /) -> MixedSlices:
        """Return how the slices of each leaf are mixed. `weights` are positive; `beacons` are random bytes, one value
        for each leaf, and the same for every member that computes that leaf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestNeighbours(Mixing):
    """Replace each slice by the weighted mean of those nearest to it (nearest-neighbour mixing, Allouah et al. 2023,
    arXiv 2302.01772, algorithm 2).

    The neighbours of a slice are the fewest nearest ones, itself included, that have 1 - `liar_share` of the weight,
    and all others that are at most `reach` times as far away as the farthest of these. Deviation: the paper has only
    the first part, and counts members. There, liars whose slices lie among the honest ones take the place of honest
    neighbours in every mean, since the number of neighbours is fixed; the second part keeps the honest ones. A slice
    farther away than `reach` times the farthest honest slice still moves no mixed slice of an honest member
    (`tests/bench/test_bench_attacks.py` compares both).
    """

    name: ClassVar[str] = "nearest_neighbours"
    needs_products: ClassVar[bool] = True

    liar_share: float = DEFAULT_LIAR_SHARE
    reach: float = 1.2

    def mix(self, weights: Sequence[int], products_LMM: Doubles, _beacons: Sequence[bytes], /) -> MixedSlices:
        weight_M, away_LMM = np.array(weights), np.sqrt(squared_distances(products_LMM))
        order_LMM = np.argsort(away_LMM, axis=2, kind="stable")
        is_enough_LMM = np.cumsum(weight_M[order_LMM], axis=2) >= (1 - self.liar_share) * sum(weights)
        is_enough_LMM[:, :, -1] = True  # all slices together are enough, even if rounding says otherwise
        last_LM1 = np.take_along_axis(order_LMM, np.argmax(is_enough_LMM, axis=2)[:, :, None], axis=2)
        radius_LM1 = np.take_along_axis(away_LMM, last_LM1, axis=2)
        chosen_LMM = np.where(away_LMM <= self.reach * radius_LM1, weight_M, 0)
        shares_LMM = chosen_LMM / chosen_LMM.sum(axis=2, keepdims=True)
        return MixedSlices(shares_LKM=shares_LMM, weight_LK=np.broadcast_to(weight_M, shares_LMM.shape[:2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketing(Mixing):
    """Deal the slices, in the random order of the beacon, into buckets, and replace them by the buckets' weighted means
    (Karimireddy et al. 2022, arXiv 2006.09365, algorithm 1).

    A bucket has as many slices as leave a majority of buckets without a liar: M / (2 liars + 1), rounded down, and at
    least one. `liars` is `liar_share` of M, rounded down, and at least one. If liars are more than a quarter of the
    members, a bucket has a single slice, and nothing is mixed.
    """

    name: ClassVar[str] = "bucketing"
    needs_products: ClassVar[bool] = False

    liar_share: float = DEFAULT_LIAR_SHARE

    def mix(self, weights: Sequence[int], _products_LMM: Doubles, beacons: Sequence[bytes], /) -> MixedSlices:
        num_members = len(weights)
        num_buckets = -(-num_members // self.bucket_size(num_members))
        weight_LKM = np.zeros((len(beacons), num_buckets, num_members), dtype=np.int64)
        for leaf, beacon in enumerate(beacons):
            order = sorted(range(num_members), key=partial(_draw, beacon))
            for place, member in enumerate(order):
                weight_LKM[leaf, place % num_buckets, member] = weights[member]
        weight_LK = weight_LKM.sum(axis=2)
        return MixedSlices(shares_LKM=weight_LKM / weight_LK[:, :, None], weight_LK=weight_LK)

    def bucket_size(self, num_members: int) -> int:
        """Return the maximum number of slices in a bucket."""
        liars = max(1, math.floor(self.liar_share * num_members))
        return max(1, num_members // (2 * liars + 1))


def leaf_beacon(run: str, step: int, state_digest: bytes, leaf: int) -> bytes:
    """Return the random bytes of one leaf of the outer step that follows the state with this digest.

    They follow from what all replicas agree on. Liars of the step before have influenced the state, but its digest
    depends on all results of that step, so they cannot choose it; and each leaf has bytes of its own.
    """
    return hashlib.sha256(b"swarm leaf beacon\0%s\0%d\0%s%d" % (run.encode(), step, state_digest, leaf)).digest()


def _draw(beacon: bytes, member: int) -> bytes:
    return hashlib.sha256(beacon + member.to_bytes(4, "big")).digest()


NO_MIXING = "none"
DEFAULT_MIXING = NearestNeighbours.name
_KINDS = (NO_MIXING, Bucketing.name, NearestNeighbours.name)


def mixing_names() -> tuple[str, ...]:
    return _KINDS


def get_mixing(name: str, *, liar_share: float, reach: float) -> Mixing | None:
    """Return the mixing `name`, with those of the parameters that it has; None for NO_MIXING. `name` is in
    `mixing_names()`."""
    if name == Bucketing.name:
        return Bucketing(liar_share=liar_share)
    if name == NearestNeighbours.name:
        return NearestNeighbours(liar_share=liar_share, reach=reach)
    return None
