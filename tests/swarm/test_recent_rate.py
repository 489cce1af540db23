from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.recent_rate import RecentRate

WINDOW_S = 60.0


def test_rate_is_zero_at_first_and_then_over_the_elapsed_time() -> None:
    rate = RecentRate(100.0, WINDOW_S)
    assert rate.per_s(0, 100.0) == 0.0
    assert rate.per_s(50, 105.0) == 10.0


def test_rate_is_over_the_window_and_falls_to_zero_after_it() -> None:
    rate = RecentRate(0.0, WINDOW_S)
    for second in range(300):
        rate.per_s(10 * second, float(second))
    assert rate.per_s(2990, 299.0) == pytest.approx(10.0)
    later = [rate.per_s(2990, 299.0 + second) for second in range(0, 61, 15)]
    assert all(earlier > after for earlier, after in itertools.pairwise(later))
    assert later[-1] == 0.0


def test_rate_of_a_burst_after_a_long_silence_is_over_the_window() -> None:
    rate = RecentRate(0.0, WINDOW_S)
    for at in range(0, 3600, 15):
        assert rate.per_s(0, float(at)) == 0.0
    assert rate.per_s(600, 3600.0) == pytest.approx(10.0)


@given(steps=st.lists(st.tuples(st.integers(0, 1000), st.floats(0.0, 100.0)), max_size=100))
def test_rate_is_never_negative_and_keeps_a_bounded_history(steps: list[tuple[int, float]]) -> None:
    rate, count, now = RecentRate(0.0, WINDOW_S), 0, 0.0
    for tokens, seconds in steps:
        count, now = count + tokens, now + seconds
        assert rate.per_s(count, now) >= 0.0
        assert len(rate._marks) <= WINDOW_S + 2
