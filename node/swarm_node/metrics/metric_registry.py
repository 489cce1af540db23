"""One daemon's metrics: those that are counted when something happens, and those that are read at a scrape.

Only metrics of the contract are accepted. The daemon's event loop owns the state and also calls `exposition`, so a
source may read anything that the loop owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from swarm_node.metrics.metric_contract import METRICS, MetricKind, MetricSpec

CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reading:
    """A source's current value. `labels` has the label names of the contract."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


ReadingSource: TypeAlias = Callable[[], Iterable[Reading]]
Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily


class Registry:
    """The metrics of one daemon. Raises AssertionError for a metric, kind or label that is not in the contract."""

    def __init__(self) -> None:
        self._registry = prometheus.CollectorRegistry()
        self._sources = _Sources()
        self._metrics: dict[str, Any] = {}
        self._registry.register(self._sources)
        prometheus.ProcessCollector(registry=self._registry)

    def counter(self, name: str) -> prometheus.Counter:
        return self._get_or_create(name, "counter", prometheus.Counter)

    def gauge(self, name: str) -> prometheus.Gauge:
        return self._get_or_create(name, "gauge", prometheus.Gauge)

    def histogram(self, name: str) -> prometheus.Histogram:
        return self._get_or_create(
            name, "histogram", partial(prometheus.Histogram, buckets=_spec(name, "histogram").buckets)
        )

    def _get_or_create(self, name: str, kind: MetricKind, make: Callable[..., T]) -> T:
        """Return the metric. A node that repeats the same kind of work gets the existing one."""
        spec = _spec(name, kind)
        if name not in self._metrics:
            self._metrics[name] = make(name, spec.about, tuple(spec.labels), registry=self._registry)
        made: T = self._metrics[name]
        return made

    @contextmanager
    def reading(self, source: ReadingSource) -> Iterator[None]:
        """Ask `source` at each exposition while the context lasts. No two sources may give the same metric."""
        self._sources.each.append(source)
        try:
            yield
        finally:
            self._sources.each.remove(source)

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return prometheus.generate_latest(self._registry)


def start_at_zero(counter: prometheus.Counter, values: Iterable[str]) -> None:
    """Expose the counter's only label with each of `values`, before anything is counted.

    Prometheus sees no increase in a series that first appears with a value above 0.
    """
    for value in values:
        counter.labels(value)


class _Sources(Collector):
    def __init__(self) -> None:
        self.each: list[ReadingSource] = []

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for reading in (reading for source in self.each for reading in source()):
            family = families.get(reading.name) or families.setdefault(reading.name, _family(reading.name))
            assert set(reading.labels) == set(METRICS[reading.name].labels), f"{reading} has other labels"
            family.add_metric([reading.labels[label] for label in METRICS[reading.name].labels], reading.value)
        yield from families.values()


def _family(name: str) -> Family:
    spec = METRICS[name]
    kinds: dict[str, type[Family]] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    return kinds[spec.kind](name, spec.about, labels=tuple(spec.labels))


def _spec(name: str, kind: str) -> MetricSpec:
    spec = METRICS.get(name)
    assert spec is not None, f"{name} is not in the contract"
    assert spec.kind == kind, f"{name} is a {spec.kind}"
    return spec
