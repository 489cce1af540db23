"""Tests of how pages write numbers and names, and where charts draw their lines."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.dashboard_swarms import HOSTILE_NAMES, example_source
from swarm_node.dashboard import charts, wording
from swarm_node.dashboard.views import PresenceView
from swarm_node.formatting import plain

numbers = st.one_of(st.none(), st.floats(-1e12, 1e12), st.just(math.nan), st.just(math.inf))


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.0, "0"), (0.414, "0.41"), (9.996, "10"), (58.0, "58"), (999.97, "1k"), (3_140.0, "3.14k"), (2.4e6, "2.4M")],
)
def test_number_keeps_three_significant_digits(value: float, written: str) -> None:
    assert wording.number(value) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.0123, "12.3 ms"),
        (4.21, "4.2 s"),
        (42.0, "42 s"),
        (211.0, "3 min 31 s"),
        (240.0, "4 min"),
        (1500.0, "25 min"),
        (11_520.0, "3 h 12 min"),
        (9 * 86_400.0, "9 days"),
    ],
)
def test_duration_is_written_as_people_say_it(seconds: float, written: str) -> None:
    assert wording.duration(seconds) == written


def test_estimate_of_an_end_is_no_finer_than_a_second() -> None:
    written = {-1.0: "any moment now", 0.2: "in 1 s", 2.8: "in 3 s", 75.3: "in 76 s", 1500.4: "in 25 min"}
    assert {seconds: wording.until(seconds) for seconds in written} == written


def test_unknown_value_is_written_as_unknown_and_never_as_zero() -> None:
    for write in (wording.number, wording.duration, wording.num_bytes, wording.loss, wording.share, wording.count):
        assert "not known" in write(None)


@given(numbers)
def test_every_number_can_be_written(value: float | None) -> None:
    for write in (wording.number, wording.duration, wording.loss, wording.share):
        assert write(value)
    if value is not None:
        assert wording.clock(value) is not None
        assert wording.iso(value) is not None


def test_all_is_written_only_for_the_whole() -> None:
    assert wording.share(1.0) == "100 %"
    assert wording.share(0.99999) == "99.9 %"


@given(st.one_of(st.text(), st.sampled_from(HOSTILE_NAMES)), st.integers(1, 64))
def test_plain_text_is_one_line_without_hiding_or_reordering_characters(text: str, limit: int) -> None:
    shown = plain(text, limit)
    assert len(shown) <= limit
    assert not any(unicodedata.category(char)[0] == "C" for char in shown)
    assert shown == " ".join(shown.split())
    marks = [unicodedata.category(char) in {"Mn", "Me"} for char in shown]
    assert not any(all(marks[i : i + 3]) for i in range(len(marks) - 2))


def test_an_invisible_name_is_replaced_by_the_end_of_the_peer_id() -> None:
    assert wording.named("\u200b \x00", "12D3KooWabcdefgh") == "…abcdefgh"
    assert "\u202e" not in wording.named(None, "12D3KooWab\u202ecdefgh"), "an id may come from a database"
    assert wording.named("heron", "12D3KooWabcdefgh") == "heron"


def test_the_verdict_is_that_of_the_worst_relevant_state() -> None:
    small, large = example_source(9).overview(), example_source(1000).overview()
    broken = tuple(model for model in large.models if model.health == "incomplete")
    assert wording.verdict(example_source(0).overview())[0] == "none"
    assert wording.verdict(small) == ("good", "The swarm is healthy")
    assert wording.verdict(large)[0] == "thin"
    assert wording.verdict(large.model_copy(update={"models": broken}))[0] == "bad"
    assert wording.situation(large).startswith("998 volunteers are here. 2 of 3 models answer")


@given(st.lists(numbers, max_size=80))
@example([0.0, 5e-324])
@example([5e-324, 5e-324])
@example([1e12, 1e12 + 1e-4])
def test_a_curve_stays_inside_its_chart(values: list[float | None]) -> None:
    drawn = charts.curve(values)
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < 2:
        assert drawn is None
        return
    assert drawn is not None
    points = [point.split(" ") for point in drawn.line.replace("M", "L").split("L")[1:]]
    assert len(points) == len(known)
    for x, y in points:
        assert -0.01 <= float(x) <= 100.01
        assert -0.01 <= float(y) <= 100.01
    rounding = 1e-9 * (drawn.y_ticks[0] - drawn.y_ticks[-1])
    assert drawn.y_ticks[-1] <= min(known) + rounding
    assert drawn.y_ticks[0] >= max(known) - rounding


def test_a_curve_of_nothing_but_zeros_has_no_values_below_zero() -> None:
    for drawn in (charts.curve([0.0, 0.0, None, 0.0]), charts.curve([0.0, 0.0], from_zero=True)):
        assert drawn is not None
        assert drawn.y_ticks == (1.0, 0.75, 0.5, 0.25, 0.0)


@given(st.lists(st.floats(0, 1e12), min_size=2, max_size=20))
def test_no_axis_goes_below_zero_where_no_value_does(values: list[float]) -> None:
    drawn = charts.curve(values)
    assert drawn is not None
    assert drawn.y_ticks[-1] >= 0


def test_a_curve_is_broken_where_values_are_unknown() -> None:
    drawn = charts.curve([1.0, 2.0, None, 2.0, 1.0])
    assert drawn is not None
    assert drawn.line.count("M") == 2
    assert drawn.area.count("Z") == 2
    assert drawn.y_ticks == (2.0, 1.75, 1.5, 1.25, 1.0)


def test_values_are_drawn_at_their_places() -> None:
    drawn = charts.curve([3.0, 2.0, None, 1.0], places=[100, 900, 950, 1100], beside=[None, 2.0, 2.0, None])
    assert drawn is not None
    points = [point.split(" ")[0] for point in drawn.line[1:].replace("M", "L").split("L")]
    assert points == ["0.00", "80.00", "100.00"]
    assert [point.split(" ")[0] for point in drawn.beside[1:].split("L")] == ["80.00", "85.00"]


def test_a_span_from_a_record_cannot_leave_the_bar() -> None:
    assert charts.span(12, 24, 36, "serving").x == pytest.approx(100 / 3)
    for start, end in ((-5, 900), (40, 50), (20, 3)):
        part = charts.span(start, end, 36, "serving")
        assert 0 <= part.x <= 100
        assert 0 <= part.x + part.width <= 100


def test_columns_show_a_block_without_a_server_over_the_whole_height() -> None:
    none, one, four = charts.columns([0, 1, 4])
    assert (none.kind, none.height) == ("none", 100)
    assert (one.kind, one.height) == ("thin", 25)
    assert (four.kind, four.height) == ("good", 100)
    assert charts.columns([]) == ()


def test_presence_is_drawn_as_far_as_the_bar_goes() -> None:
    times = [PresenceView(since=since, until=until) for since, until in ((-900, 50), (90, None), (200, 300))]
    drawn = charts.presence(times, now=100.0, seconds=100.0)
    assert [(part.x, part.width) for part in drawn] == [(0, 50), (90, 10)]
    [short] = charts.presence([PresenceView(since=99.99, until=None)], now=100.0, seconds=100.0)
    assert (short.x, short.width) == (pytest.approx(99.7), 0.3), "a node that has just come is visible inside the bar"


def test_neighbouring_blocks_with_equally_many_servers_are_described_together() -> None:
    assert charts.runs_of([2, 2, 0, 1, 1]) == ((0, 2, 2), (2, 3, 0), (3, 5, 1))
    assert charts.marks(0, 36) == (0, 9, 18, 27, 36)
    assert charts.marks(5, 5) == (5, 5)
    assert charts.marks(0, 6) == (0, 2, 4, 6)
    assert charts.marks(0, 7) == (0, 7)
    assert charts.marks(0, 101) == (0, 25, 50, 76, 101)


def test_curve_beside_another_shares_its_scale_and_leaves_out_unknown_values() -> None:
    drawn = charts.curve([4.0, 3.0, 2.0], beside=[None, 8.0, 6.0])
    assert drawn is not None
    assert drawn.y_ticks[0] >= 8.0
    assert drawn.beside.startswith("M50.00 ")
    assert drawn.beside.count("L") == 1
    alone = charts.curve([4.0, 3.0, 2.0], beside=[None, 8.0, None])
    assert alone is not None
    assert alone.beside == "", "one point is no line"
