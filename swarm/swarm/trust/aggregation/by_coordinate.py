"""Aggregators that sort each coordinate on its own: coordinate median and trimmed mean.

Memory at the owner: one decoded frame of each member, and a few blocks. Shapes: M members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from swarm.trust.aggregation.aggregator import Aggregator, Decision, Survey, bounded
from swarm.trust.aggregation.columns import Doubles, median_cut


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateMedian(Aggregator):
    """The weighted median of each coordinate; the middle of both where two share it (Yin et al. 2018,
    arXiv 1803.01498, definition 1, there without weights). Holds while liars have less than half of the weight."""

    name: ClassVar[str] = "median"
    survey: ClassVar[Survey] = "nothing"

    def decide(self, weights: Sequence[int], _survey: Doubles, /) -> Decision:
        return Decision(coefficients=(0.0,) * len(weights), centre=1.0, cut=median_cut(weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMean(Aggregator):
    """The mean of each coordinate without the lowest and highest `trim` of the weight (Yin et al. 2018,
    arXiv 1803.01498, definition 2, there without weights).

    A member across the edge of what is cut counts with the rest of its weight. Holds while liars have at most `trim` of
    the weight.
    """

    name: ClassVar[str] = "trimmed_mean"
    survey: ClassVar[Survey] = "nothing"

    trim: float = bounded(0.2, 0.0, 0.49)

    def decide(self, weights: Sequence[int], _survey: Doubles, /) -> Decision:
        cut = min(math.ceil(self.trim * sum(weights)), median_cut(weights))
        return Decision(coefficients=(0.0,) * len(weights), centre=1.0, cut=cut)
