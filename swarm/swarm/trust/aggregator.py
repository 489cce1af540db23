"""Defines what an aggregator is: a short pure decision about the members' slices of one leaf, with M or M x M numbers
as input.

The loops over values are in `aggregation` and `kernels`. The result of every aggregator is

    sum over members of coefficient * slice  +  centre * (a point that the aggregation knows, see `Aggregator.survey`)

Decisions use fp64 with correctly rounded sums (`math.fsum`), so that they are the same bits on every machine. Nothing
here knows peers or codecs. Shapes: M members.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeAlias

from swarm.trust.kernels import Doubles
from swarm.trust.mixing import Mixing

Survey: TypeAlias = Literal["nothing", "norms", "products", "distances"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationReport:
    """Holds what the aggregation did to each member, in the members' order.

    `kept` is the share of each slice's weight that was left: 1 for all, 0 for a slice that was left out; it is empty
    where each coordinate is aggregated on its own. `note` says why the result is less robust than the run asks for."""

    kept: tuple[float, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationDecision:
    """Holds what an aggregator decided: `coefficients` and `centre` of the module's formula. `cut` is the weight to
    trim at each end where the centre is a trimmed mean of each coordinate."""

    coefficients: tuple[float, ...]
    centre: float = 0.0
    cut: int = 0
    report: AggregationReport = AggregationReport()


def bounded(default: float, low: float, high: float) -> Any:
    """Declare a parameter of an aggregator. It is a whole number if the default is one."""
    return field(default=default, metadata={"low": low, "high": high})


def parameter_fields(kind: type[Aggregator]) -> tuple[Field[Any], ...]:
    return tuple(each for each in fields(kind) if "low" in each.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregator(ABC):
    """An aggregator, whose fields are its parameters. Raises ValueError that names each impossible one.

    `mixing` is no parameter: it says how the slices are mixed before this aggregator sees them; None: not at all. What
    follows then holds for the mixed slices.
    """

    name: ClassVar[str]
    survey: ClassVar[Survey]
    """The input of `decide`: nothing; norms [M]; scalar products [M, M] of the slices; or those of the slices less a
    start, which is then the centre of the formula: the median of each coordinate, or the medoid of mixed slices. The
    centre of an aggregator that surveys nothing is the trimmed mean of each coordinate."""

    mixing: Mixing | None = None

    def __post_init__(self) -> None:
        problems = []
        for each in parameter_fields(type(self)):
            value, low, high = getattr(self, each.name), each.metadata["low"], each.metadata["high"]
            whole = isinstance(each.default, int)
            number = type(value) is int if whole else type(value) in {int, float}
            if not number or not low <= value <= high:
                kind = "whole number" if whole else "number"
                problems.append(f"{each.name} = {repr(value)[:80]}: use a {kind} from {low:g} to {high:g}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def is_fixed(self) -> bool:
        """Return whether the decision depends on no slice, and on no leaf."""
        return self.survey == "nothing" and self.mixing is None

    @abstractmethod
    def decide(self, weights: Sequence[int], survey: Doubles, /) -> AggregationDecision:
        """Return the decision, with one coefficient for each of `weights`, which are positive."""

    def fewest_members(self) -> int:
        """Return how many members must contribute for the robustness that the parameters promise."""
        return 1


def shares(weights: Sequence[int]) -> tuple[float, ...]:
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def weighted_median(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the lowest value that, with all below it, has at least half of the weight."""
    below, total = 0, sum(weights)
    for value, weight in sorted(zip(values, weights, strict=True)):
        below += weight
        if 2 * below >= total:
            return value
    raise ValueError("the median of nothing")


def distances(products_MM: Doubles, coefficients: Sequence[float]) -> tuple[float, ...]:
    """Return the distance from each member's slice to the point sum of coefficient * slice, all relative to the
    centre."""
    pull = [math.fsum((row * coefficients).tolist()) for row in products_MM]
    square = math.fsum(each * coefficient for each, coefficient in zip(pull, coefficients, strict=True))
    own = products_MM.diagonal().tolist()
    return tuple(
        math.sqrt(max(0.0, math.fsum((norm, -each, -each, square)))) for norm, each in zip(own, pull, strict=True)
    )


def kept_shares(coefficients: Sequence[float], fair: Sequence[float]) -> tuple[float, ...]:
    """Return the share of its pull that each slice keeps, where `fair` is all of it."""
    return tuple(min(1.0, max(0.0, each / share)) for each, share in zip(coefficients, fair, strict=True))
