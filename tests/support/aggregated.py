"""Aggregates a part whose frames are all in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from swarm.trust.aggregator import AggregationReport, Aggregator
from swarm.trust.kernels import Floats
from swarm.trust.leaf_aggregation import Aggregation


def aggregate(
    aggregator: Aggregator,
    frames: Callable[[], Iterable[Iterable[Floats]]],
    weights: Sequence[int],
    beacon: bytes = b"",
) -> tuple[Floats, AggregationReport]:
    """Return the result [N] for a part whose frames are in memory, and the report. Each call of `frames()` yields all
    frames again. Raises as Aggregation does."""
    aggregation = Aggregation(aggregator, weights, [beacon])
    if aggregation.has_survey:
        for rows in frames():
            aggregation.survey(rows)
    report = aggregation.decide()
    results = [aggregation.combine(rows) for rows in frames()]
    return np.concatenate([np.empty(0, dtype=np.float32), *results]), report
