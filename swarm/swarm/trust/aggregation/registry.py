"""The aggregators by name. Adding one is a line here and a row in the tests' table; it has no state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from swarm.trust.aggregation.aggregator import Aggregator
from swarm.trust.aggregation.by_coordinate import CoordinateMedian, TrimmedMean
from swarm.trust.aggregation.by_distance import CenteredClip, GeometricMedian
from swarm.trust.aggregation.by_weight import Mean, MultiKrum, NormClippedMean

_AGGREGATORS: dict[str, type[Aggregator]] = {
    kind.name: kind
    for kind in (Mean, NormClippedMean, CoordinateMedian, TrimmedMean, GeometricMedian, CenteredClip, MultiKrum)
}


def aggregator_names() -> tuple[str, ...]:
    return tuple(_AGGREGATORS)


def parameter_names(name: str) -> tuple[str, ...]:
    """Of an aggregator in `aggregator_names()`."""
    return tuple(each.name for each in fields(_AGGREGATORS[name]))


def get_aggregator(name: str, parameters: Mapping[str, float]) -> Aggregator:
    """One in `aggregator_names()`, with its defaults where `parameters` says nothing. Raises ValueError."""
    if unknown := [key for key in parameters if key not in parameter_names(name)]:
        raise ValueError(f"{name} has no parameter {unknown[0]!r}: it has {', '.join(parameter_names(name)) or 'none'}")
    return _AGGREGATORS[name](**parameters)


def parameters_of(aggregator: Aggregator) -> dict[str, float]:
    """All of them. What counts is a whole number, what measures is not, so that equal settings have equal bytes."""
    values = {each.name: getattr(aggregator, each.name) for each in fields(aggregator)}
    return {
        each.name: values[each.name] if isinstance(each.default, int) else float(values[each.name])
        for each in fields(aggregator)
    }
