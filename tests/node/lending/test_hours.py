"""Hours of the day: valid windows, whether a time is in one, and when that changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_node.lending.lending import DAY_MIN, Window, is_open, next_change, parse_window


@pytest.fixture(autouse=True, scope="module")
def _berlin() -> Iterator[None]:
    """Let the machine be in a place with daylight saving time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


def _at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


NIGHT, NOON = parse_window("22:00-07:00"), parse_window("12:00-13:30")


@pytest.mark.parametrize(
    ("at", "open_", "until"),
    [
        ("2026-11-23T21:59:59", False, "2026-11-23T22:00:00"),
        ("2026-11-23T22:00:00", True, "2026-11-24T07:00:00"),
        ("2026-11-23T03:00:00", True, "2026-11-23T07:00:00"),
        ("2026-11-23T07:00:00", False, "2026-11-23T12:00:00"),
        ("2026-11-23T12:30:00", True, "2026-11-23T13:30:00"),
        # clocks go forward at 02:00 and back at 03:00
        ("2026-03-29T01:30:00", True, "2026-03-29T07:00:00"),
        ("2026-10-25T01:30:00", True, "2026-10-25T07:00:00"),
        ("2026-10-25T14:00:00", False, "2026-10-25T22:00:00"),
    ],
)
def test_windows_over_midnight_and_at_noon_open_and_close_by_local_time(at: str, open_: bool, until: str) -> None:
    assert is_open((NIGHT, NOON), _at(at)) is open_
    assert next_change((NIGHT, NOON), _at(at)) == _at(until)


def test_window_in_the_hour_that_comes_twice_is_open_twice() -> None:
    windows = [parse_window("02:15-02:45")]
    first = datetime.fromisoformat("2026-10-25T02:50:00").timestamp()
    second = datetime.fromisoformat("2026-10-25T02:15:00").replace(fold=1).timestamp()
    assert second == first + 25 * 60
    assert not is_open(windows, first)
    assert next_change(windows, first) == second
    assert is_open(windows, second)
    assert next_change(windows, second) == second + 30 * 60


@pytest.mark.parametrize(
    ("window", "at", "until"),
    [
        ("02:30-06:00", "2026-03-29T01:45:00", "2026-03-29T03:00:00"),  # 02:30 does not exist
        ("01:00-02:30", "2026-03-29T01:45:00", "2026-03-29T03:00:00"),
        ("02:30-06:00", "2026-10-25T02:40:00", "2026-10-25T02:00:00"),  # 02:00 comes again
        ("01:00-02:15", "2026-10-25T02:40:00", "2026-10-25T02:00:00"),
    ],
)
def test_change_of_the_clock_opens_and_closes_a_window(window: str, at: str, until: str) -> None:
    windows, change = [parse_window(window)], datetime.fromisoformat(until).replace(fold=1).timestamp()
    assert next_change(windows, _at(at)) == change
    assert is_open(windows, change) != is_open(windows, change - 1)


def test_without_windows_or_with_a_whole_day_nothing_ever_changes() -> None:
    at = _at("2026-11-23T12:00:00")
    for windows in ((), (parse_window("00:00-24:00"),), (parse_window("00:00-12:00"), parse_window("12:00-24:00"))):
        assert is_open(windows, at)
        assert next_change(windows, at) is None


@given(
    st.lists(st.tuples(st.integers(0, DAY_MIN - 1), st.integers(0, DAY_MIN - 1)), min_size=1, max_size=4),
    st.floats(0, 2e9),
)
def test_next_change_is_the_first_minute_that_differs(pairs: list[tuple[int, int]], at: float) -> None:
    windows = [Window(*pair) for pair in pairs if pair[0] != pair[1]]
    change = next_change(windows, at)
    if change is None:
        return
    assert at < change <= at + 2 * 86_400 + 3600
    assert is_open(windows, change) != is_open(windows, at)
    for share in (0.1, 0.5, 0.9):
        if change - at < 3000:  # no clock is changed twice within an hour
            assert is_open(windows, at + share * (change - at) // 60 * 60) == is_open(windows, at)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "22",
        "22-07",
        "25:00-07:00",
        "22:60-07:00",
        "24:00-07:00",
        "07:00-07:00",
        "-1:00-07:00",
        "22:00",
        "now",
        "٢٢:00-07:00",
    ],
)
def test_invalid_time_of_the_day_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^is (not a|an empty) range"):
        parse_window(text)


def test_window_is_written_as_it_is_read() -> None:
    assert str(parse_window("7:05-24:00")) == "07:05-24:00"
