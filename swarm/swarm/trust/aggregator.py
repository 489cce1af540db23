"""Defines the interface of aggregators: an aggregator decides from at most M x M numbers of each leaf how the members'
slices are combined.

The loops over values are in `leaf_aggregation` and `kernels`. The result of every aggregator is

    sum over members of coefficient * slice  +  centre * (the start or trimmed mean, see `Aggregator.survey`)

An aggregator decides about many leaves at a time, since Python's overhead for one leaf exceeds its arithmetic. The
decision for a leaf has the same bits on every machine, with or without other leaves: decisions use elementwise
operations in fp64, which IEEE 754 rounds alike everywhere, and sums in a fixed order (`kernels.ordered_sum`). Peers and
codecs are unknown here. Shapes: L leaves, M members.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from swarm_protocol.toml_text import toml_value

from swarm.trust.kernels import Doubles, Whole, diagonal, matrix_product, ordered_sum
from swarm.trust.mixing import Mixing

Survey: TypeAlias = Literal["nothing", "norms", "products", "distances"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationReport:
    """The effect of the aggregation on each member, in the members' order.

    `kept` is the share of each slice's weight that was kept, averaged over the leaves: 1 for all of it, 0 for a slice
    that was left out. `kept` is empty where each coordinate is aggregated on its own. `note` says why the result is
    less robust than the run asks for."""

    kept: tuple[float, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AggregationDecision:
    """The decision of an aggregator about each leaf: `coefficients_LM` and `centre_L` of the module's formula.
    `cut_L` is the weight to trim at each end where the centre is a trimmed mean of each coordinate. `kept_LM` and
    `note` are those of the report; `kept_LM` is None where each coordinate is aggregated on its own."""

    coefficients_LM: Doubles
    centre_L: Doubles
    cut_L: Whole
    kept_LM: Doubles | None = None
    note: str = ""


def decided_sum(coefficients_LM: Doubles, kept_LM: Doubles | None = None, note: str = "") -> AggregationDecision:
    """Return the decision for a sum of slices without a centre."""
    num_leaves = len(coefficients_LM)
    return AggregationDecision(
        coefficients_LM=coefficients_LM,
        centre_L=np.zeros(num_leaves),
        cut_L=np.zeros(num_leaves, dtype=np.int64),
        kept_LM=kept_LM,
        note=note,
    )


def bounded(default: float, low: float, high: float) -> Any:
    """Declare a parameter of an aggregator from `low` to `high`. The parameter is a whole number if `default` is
    one."""
    return field(default=default, metadata={"low": low, "high": high})


def parameter_fields(kind: type[Aggregator]) -> tuple[Field[Any], ...]:
    return tuple(each for each in fields(kind) if "low" in each.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregator(ABC):
    """An aggregator, whose fields are its parameters. Raises a ValueError that names each parameter out of bounds.

    `mixing` is no parameter: it says how the slices are mixed before this aggregator sees them, or is None. With a
    mixing, `decide` is about the mixed slices.
    """

    name: ClassVar[str]
    survey: ClassVar[Survey]
    """The input of `decide`: "nothing"; "norms" [L, M] of the slices; their scalar "products" [L, M, M]; or
    "distances": the scalar products [L, M, M] of the slices minus a start. The start is the median of each coordinate,
    or the medoid of mixed slices, and is the centre of the formula. With "nothing", the centre is the trimmed mean of
    each coordinate."""

    mixing: Mixing | None = None

    def __post_init__(self) -> None:
        problems = []
        for each in parameter_fields(type(self)):
            value, low, high = getattr(self, each.name), each.metadata["low"], each.metadata["high"]
            whole = isinstance(each.default, int)
            number = type(value) is int if whole else type(value) in {int, float}
            if not number or not low <= value <= high:
                kind = "whole number" if whole else "number"
                problems.append(f"{each.name} = {toml_value(value)[:80]}: use a {kind} from {low:g} to {high:g}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def is_fixed(self) -> bool:
        """Return whether the decision is the same for all slices and leaves."""
        return self.survey == "nothing" and self.mixing is None

    @abstractmethod
    def decide(self, weight_LM: Whole, survey: Doubles, /) -> AggregationDecision:
        """Return the decision, with one coefficient for each weight of `weight_LM`. Weights are positive."""

    def fewest_members(self) -> int:
        """Return the number of members that must contribute for the robustness that the parameters promise."""
        return 1


def shares(weight_LM: Whole) -> Doubles:
    """Return each weight as a share of its leaf's total weight [L, M]."""
    shares_LM: Doubles = weight_LM / weight_LM.sum(axis=1, keepdims=True)
    return shares_LM


def weighted_median(value_LM: Doubles, weight_LM: Whole) -> Doubles:
    """Return for each leaf the lowest value that, together with all lower ones, has at least half of the weight [L]."""
    order_LM = np.argsort(value_LM, axis=1, kind="stable")
    # for a few small leaves, `np.take_along_axis` would take as long as all else here
    rows_L = np.arange(len(value_LM))
    below_LM = np.cumsum(weight_LM[rows_L[:, None], order_LM], axis=1)
    first_L = np.argmax(2 * below_LM >= below_LM[:, -1:], axis=1)
    median_L: Doubles = value_LM[rows_L, order_LM[rows_L, first_L]]
    return median_L


def distances(products_LMM: Doubles, coefficients_LM: Doubles) -> Doubles:
    """Return the distance from each member's slice to the point that is the sum of coefficient * slice, all relative to
    the centre [L, M]."""
    pull_LM = matrix_product(products_LMM, coefficients_LM[:, :, None])[:, :, 0]
    square_L = ordered_sum(pull_LM * coefficients_LM)
    return np.sqrt(np.maximum(0.0, diagonal(products_LMM) - 2 * pull_LM + square_L[:, None]))


def kept_shares(coefficients_LM: Doubles, fair_LM: Doubles) -> Doubles:
    """Return the share of its weight that each slice keeps [L, M], where `fair_LM` is all of its weight."""
    return np.clip(coefficients_LM / fair_LM, 0.0, 1.0)
