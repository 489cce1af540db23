"""Aggregators that weigh whole slices: mean, norm-clipped mean and multi-Krum. Shapes: M members."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from swarm.trust.aggregation.aggregator import (
    Aggregator,
    Decision,
    Report,
    Survey,
    bounded,
    shares,
    weighted_median,
)
from swarm.trust.aggregation.columns import Doubles


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean(Aggregator):
    """The weighted mean. One liar moves it anywhere. Memory: one decoded frame."""

    name: ClassVar[str] = "mean"
    survey: ClassVar[Survey] = "nothing"

    def decide(self, weights: Sequence[int], _survey: Doubles, /) -> Decision:
        return Decision(coefficients=shares(weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormClippedMean(Aggregator):
    """The weighted mean of slices that are scaled down to `ratio` times their weighted median norm.

    Bounds how far a liar moves the result, not where to: liars with share s move it by up to s * ratio * median norm.
    If at least half of the weight sends zeros, the result is zero. Memory: one decoded frame, and the part's encoded
    slices, because norms are known only when all have come.
    """

    name: ClassVar[str] = "norm_clipped_mean"
    survey: ClassVar[Survey] = "norms"

    ratio: float = bounded(1.0, 0.1, 10.0)

    def decide(self, weights: Sequence[int], survey: Doubles, /) -> Decision:
        norms = tuple(survey.tolist())
        limit = self.ratio * weighted_median(norms, weights)
        kept = tuple(1.0 if norm <= limit else limit / norm for norm in norms)
        return Decision(
            coefficients=tuple(share * each for share, each in zip(shares(weights), kept, strict=True)),
            report=Report(norms=norms, kept=kept),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiKrum(Aggregator):
    """The weighted mean of all but the `liars` slices that are farthest from their nearest others (Blanchard et al.
    2017, arXiv 1703.02757, section 4): a slice's score is the sum of its squared distances to the M - liars - 2
    nearest others, and the M - liars lowest scores stay. Equal scores: the earlier member stays.

    It counts members, not tokens, so admission has to see to it that a liar is one member. The promise needs
    M >= 2 liars + 3; where fewer contribute, as many liars as that many allow are left out, and the report says so
    (refusing would stop a run for good when members leave). Memory: one decoded frame of each member, and the part's
    encoded slices.
    """

    name: ClassVar[str] = "multi_krum"
    survey: ClassVar[Survey] = "distances"

    liars: int = bounded(1, 0, 126)

    def decide(self, weights: Sequence[int], survey: Doubles, /) -> Decision:
        num_members = len(weights)
        liars = min(self.liars, max(0, (num_members - 3) // 2))
        note = (
            f"{liars} liars are left out instead of {self.liars}, because only {num_members} members contribute"
            if liars < self.liars
            else ""
        )
        scores = [_score(survey, member, num_members - liars - 2) for member in range(num_members)]
        order = sorted(range(num_members), key=lambda member: (scores[member], member))
        selected = set(order[: num_members - liars])
        chosen = [weight if member in selected else 0 for member, weight in enumerate(weights)]
        return Decision(
            coefficients=shares(chosen),
            report=Report(
                norms=tuple(math.sqrt(own) for own in survey.diagonal().tolist()),
                kept=tuple(float(member in selected) for member in range(num_members)),
                note=note,
            ),
        )

    def fewest_members(self) -> int:
        return 2 * self.liars + 3 if self.liars else 1


def _score(products_MM: Doubles, member: int, num_nearest: int) -> float:
    own_M, cross_M = products_MM.diagonal().tolist(), products_MM[member].tolist()
    squares = sorted(
        max(0.0, math.fsum((own_M[member], own_M[other], -2 * cross_M[other])))
        for other in range(len(own_M))
        if other != member
    )
    return math.fsum(squares[: max(0, num_nearest)])
