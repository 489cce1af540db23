"""The face of an aggregator: what it needs to know of a part's slices, and what it makes of that.

An aggregator decides with M numbers or M x M numbers; the loops over values are `aggregation`'s. So its decision is a
pure function that fits a page, and every aggregator's result is

    sum over members of coefficient * slice  +  centre * trimmed mean of each coordinate

Decisions use fp64 with correctly rounded sums (`math.fsum`), so that they are the same bits on every machine.
Whatever is robust here is so for each part on its own, and by weight (tokens that the round has granted), except where
an aggregator says that it counts members. Shapes: M members.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeAlias

from swarm.trust.aggregation.columns import Doubles

Survey: TypeAlias = Literal["nothing", "norms", "distances"]


class AggregationError(ValueError):
    """Slices that cannot be aggregated."""


class NotFinite(AggregationError):
    """`member`, counted in the given order, sent NaN or infinity."""

    def __init__(self, member: int) -> None:
        super().__init__(f"the slice of member {member} holds a value that is not finite")
        self.member = member


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What happened to whom, by the members' order.

    `norms`: of each slice, or its distance from the centre, as far as the aggregator looks at that. `kept`: how much of
    each slice's pull was left, 1 for all and 0 for one that was left out; both are empty where each coordinate has its
    own answer. `note`: why the result is less robust than the run asks for.
    """

    norms: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()
    note: str = ""

    @property
    def left_out(self) -> tuple[int, ...]:
        return tuple(member for member, kept in enumerate(self.kept) if kept == 0)

    @property
    def clipped(self) -> tuple[int, ...]:
        return tuple(member for member, kept in enumerate(self.kept) if 0 < kept < 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`coefficients` and `centre` as the module's formula has them; `cut` is the weight trimmed at each end."""

    coefficients: tuple[float, ...]
    centre: float = 0.0
    cut: int = 0
    report: Report = Report()


def bounded(default: float, low: float, high: float) -> Any:
    """A parameter of an aggregator, a whole number where the default is one."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregator(ABC):
    """Its fields are its parameters. Raises ValueError that names each impossible one."""

    name: ClassVar[str]
    survey: ClassVar[Survey]
    """What `decide` is given: nothing, norms [M], or products [M, M] of the slices less the coordinates' median."""

    def __post_init__(self) -> None:
        problems = []
        for each in fields(self):
            value, low, high = getattr(self, each.name), each.metadata["low"], each.metadata["high"]
            whole = isinstance(each.default, int)
            number = type(value) is int if whole else type(value) in {int, float}
            if not number or not low <= value <= high:
                kind = "whole number" if whole else "number"
                problems.append(f"{each.name} = {repr(value)[:80]}: use a {kind} from {low:g} to {high:g}")
        if problems:
            raise ValueError("; ".join(problems))

    @abstractmethod
    def decide(self, weights: Sequence[int], survey: Doubles, /) -> Decision:
        """`weights` are positive. One coefficient for each."""

    def fewest_members(self) -> int:
        """How many must contribute for what the parameters promise."""
        return 1


def shares(weights: Sequence[int]) -> tuple[float, ...]:
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def weighted_median(values: Sequence[float], weights: Sequence[int]) -> float:
    """The lowest value that, with all below it, has at least half of the weight."""
    below, total = 0, sum(weights)
    for value, weight in sorted(zip(values, weights, strict=True)):
        below += weight
        if 2 * below >= total:
            return value
    raise ValueError("the median of nothing")


def distances(products_MM: Doubles, coefficients: Sequence[float]) -> tuple[float, ...]:
    """From each member's slice to the point sum of coefficient * slice, all relative to the centre."""
    pull = [math.fsum((row * coefficients).tolist()) for row in products_MM]
    square = math.fsum(each * coefficient for each, coefficient in zip(pull, coefficients, strict=True))
    own = products_MM.diagonal().tolist()
    return tuple(
        math.sqrt(max(0.0, math.fsum((norm, -each, -each, square)))) for norm, each in zip(own, pull, strict=True)
    )
