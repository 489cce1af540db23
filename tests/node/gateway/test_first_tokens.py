from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from swarm_node.gateway.metrics import MAX_WAITS, WINDOW_S, FirstTokenWaits, Metrics
from swarm_node.metrics.metric_registry import Registry
from swarm_node.node import FirstTokenWait


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_first_tokens_without_requests_are_not_known() -> None:
    assert FirstTokenWaits().newest() is None


def test_first_tokens_are_the_median_and_the_95th_percentile() -> None:
    waits = FirstTokenWaits(Clock())
    for hundredth in range(100, 0, -1):
        waits.add(hundredth / 100)
    assert waits.newest() == FirstTokenWait(p50_s=0.5, p95_s=0.95)


def test_first_tokens_of_one_request_are_its_own() -> None:
    waits = FirstTokenWaits(Clock())
    waits.add(0.7)
    assert waits.newest() == FirstTokenWait(p50_s=0.7, p95_s=0.7)


def test_first_tokens_forget_what_is_older_than_their_window() -> None:
    clock = Clock()
    waits = FirstTokenWaits(clock)
    waits.add(9.0)
    clock.now += WINDOW_S - 1
    waits.add(1.0)
    assert waits.newest() == FirstTokenWait(p50_s=1.0, p95_s=9.0)
    clock.now += 2
    assert waits.newest() == FirstTokenWait(p50_s=1.0, p95_s=1.0)
    clock.now += WINDOW_S
    assert waits.newest() is None


def test_first_tokens_of_very_many_requests_are_of_the_newest() -> None:
    waits = FirstTokenWaits(Clock())
    for _ in range(MAX_WAITS):
        waits.add(9.0)
    for _ in range(MAX_WAITS):
        waits.add(1.0)
    assert waits.newest() == FirstTokenWait(p50_s=1.0, p95_s=1.0)


@given(st.lists(st.floats(0, 3600), min_size=1, max_size=50))
def test_first_tokens_of_any_requests_lie_among_them(seconds: list[float]) -> None:
    waits = FirstTokenWaits(Clock())
    for each in seconds:
        waits.add(each)
    found = waits.newest()
    assert found is not None
    assert found.p50_s in seconds
    assert found.p95_s in seconds
    assert sum(each <= found.p50_s for each in seconds) * 2 >= len(seconds)
    assert sum(each <= found.p95_s for each in seconds) * 100 >= 95 * len(seconds)
    assert found.p50_s <= found.p95_s


def test_metrics_of_a_request_time_its_first_token_once() -> None:
    metrics = Metrics(Registry())
    with metrics.request() as times:
        assert metrics.first_tokens.newest() is None
        times.token(0)
        first = metrics.first_tokens.newest()
        times.token(0)
        times.token(1)
    assert first is not None
    assert metrics.first_tokens.newest() == first
    with metrics.request():
        pass  # refused, without a token
    assert metrics.first_tokens.newest() == first
