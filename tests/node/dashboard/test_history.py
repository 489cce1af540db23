"""The history answers what was recorded, equally from a SQLite file and from PostgreSQL."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.history_places import place, postgres  # noqa: F401
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import sign_mapping, to_mapping
from swarm_node.dashboard.history import reader
from swarm_node.dashboard.history.history import DashboardHistory
from swarm_node.dashboard.history.reader import Turnover
from swarm_node.dashboard.history.recorder import PresenceFact, RefusalFact, SamplesFact, SeriesSample, StepFact
from swarm_node.dashboard.history.retention import HOUR_S, RetentionLimits
from swarm_node.dashboard.history.writer import WriterTiming
from swarm_node.dashboard.views import ChangeEvent, RefusalView, StepView
from swarm_node.formatting import DAY_S
from swarm_protocol.identity import Identity

STORY = RunConfig(name="story")
NOW = 1_800_000_000.0
HOSTILE = [
    "'; DROP TABLE history_nodes; --",
    "<script>alert(1)</script>",
    "zero\0byte",
    "half a pair \ud800",
    "\u202eright to left",
    "long " * 2000,
    "%s %(name)s :name ?",
    "",
]


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def remembered(
    place: Path | str,  # noqa: F811
    tell: Callable[[DashboardHistory], None],
    ask: Callable[[DashboardHistory], Awaitable[object]],
    *,
    clock: Clock | None = None,
    limits: RetentionLimits | None = None,
) -> None:
    async def run() -> None:
        async with DashboardHistory(place, clock=clock or Clock(), limits=limits) as history:
            assert history.problem is None
            tell(history)
            assert await history.flushed(110)
            await ask(history)

    asyncio.run(run())


def step(number: int, **values: object) -> StepFact:
    fields: dict[str, object] = {
        "run": "run-1",
        "outer_step": number,
        "at": NOW - 1e5 + number,
        "loss": 1.0 / number,
        "digest": f"d{number}",
        "group": ("ada", "ben"),
        "num_tokens": 30,
        **dict.fromkeys(("seconds", "bytes_per_parameter")),
        "phases_s": {},
    }
    given = fields | values
    about = {name: given.pop(name) for name in ("run", "group")}
    view = StepView.model_construct(**given, num_members=2)  # type: ignore[arg-type]
    return StepFact(**about, step=view)  # type: ignore[arg-type]


def refusal(number: int, **values: object) -> RefusalView:
    fields: dict[str, object] = {
        "outer_step": number,
        "at": NOW + number,
        "peer_id": "eve",
        "name": "Eve",
        "by_peer_id": "ada",
        "reason": "its norm is 9",
    }
    return RefusalView(**(fields | values))  # type: ignore[arg-type]


def counts(turnover: Turnover) -> tuple[int, int]:
    assert turnover.since is not None
    assert turnover.since < NOW - 300
    return turnover.joins, turnover.leaves


def test_signed_file_of_a_run_is_read_after_a_restart(place: Path | str) -> None:  # noqa: F811
    signed = sign_mapping(STORY, to_mapping(STORY), Identity(bytes(32)), 1)

    def tell(history: DashboardHistory) -> None:
        history.record(step(1))
        history.record(replace(step(2), file=signed.text))
        history.record(replace(step(3), file="another file"))
        history.record(replace(step(1, run="damaged"), file="x = 1"))

    async def ask(history: DashboardHistory) -> None:
        assert await history.run("run-1") == signed
        assert (await history.run("damaged"), await history.run("nothing")) == (None, None)
        assert await history.runs() == ("run-1", "damaged")

    remembered(place, tell, ask)
    remembered(place, lambda _: None, ask)


def test_presence_follows_from_looks(place: Path | str) -> None:  # noqa: F811
    def tell(history: DashboardHistory) -> None:
        history.record(PresenceFact(NOW - 500, frozenset({"ada", "ben"})))
        history.record(PresenceFact(NOW - 400, frozenset({"ada", "cyd"})))
        history.record(PresenceFact(NOW - 300, frozenset({"ada", "ben", "cyd"})))

    async def ask(history: DashboardHistory) -> None:
        ben = await history.presence("ben")
        assert [(each.since, each.until) for each in ben] == [(NOW - 500, NOW - 400), (NOW - 300, None)]
        assert [(each.since, each.until) for each in await history.presence("ada")] == [(NOW - 500, None)]
        assert await history.presence("nobody") == ()
        # nodes at the first look have not just come
        assert counts(await history.turnover()) == (2, 1)
        assert counts(await history.turnover(hours=350 / 3600)) == (1, 0)

    remembered(place, tell, ask)


def test_presence_continues_over_a_short_restart_and_ends_in_a_long_one(place: Path | str) -> None:  # noqa: F811
    async def nothing(_: DashboardHistory) -> None: ...

    async def ask(history: DashboardHistory) -> None:
        assert [(each.since, each.until) for each in await history.presence("ada")] == [
            (NOW - 9000, NOW - 8900),
            (NOW - 100, None),
        ]
        assert counts(await history.turnover()) == (0, 1)

    remembered(place, lambda history: history.record(PresenceFact(NOW - 9000, frozenset({"ada", "ben"}))), nothing)
    remembered(place, lambda history: history.record(PresenceFact(NOW - 8900, frozenset({"ada"}))), nothing)
    remembered(place, lambda history: history.record(PresenceFact(NOW - 100, frozenset({"ada", "ben"}))), ask)


def test_presence_survives_a_clock_that_was_a_day_ahead(place: Path | str) -> None:  # noqa: F811
    def tell(history: DashboardHistory) -> None:
        history.record(PresenceFact(NOW + DAY_S, frozenset({"ada"})))
        history.record(PresenceFact(NOW, frozenset({"ada"})))
        history.record(PresenceFact(NOW + 5, frozenset()))

    async def ask(history: DashboardHistory) -> None:
        spans = await history.presence("ada")
        assert len(spans) == 2
        assert all(each.until is not None and each.until >= each.since for each in spans)

    remembered(place, tell, ask)


def test_series_averages_and_leaves_gaps(place: Path | str) -> None:  # noqa: F811
    def tell(history: DashboardHistory) -> None:
        for ago, value in [(60, 1.0), (59, 3.0), (30, 8.0), (0, math.nan), (0, math.inf), (0, 1e300)]:
            history.record(SamplesFact(NOW - ago, (SeriesSample(name="tokens_per_s", unit="tok/s", value=value),)))
        history.record(SamplesFact(math.nan, (SeriesSample(name="tokens_per_s", unit="tok/s", value=5.0),)))

    async def ask(history: DashboardHistory) -> None:
        fine = await history.series("tokens_per_s", 0.05)
        assert fine is not None
        assert (fine.unit, fine.step_s) == ("tok/s", 5.0)
        assert [value for value in fine.values if value is not None] == [2.0, 8.0]
        assert fine.values[-7] == 8.0
        assert fine.values[-1] is None
        coarse = await history.series("tokens_per_s", 30 * 24)
        assert coarse is not None
        assert (coarse.step_s, len(coarse.values)) == (3600.0, 721)
        assert [value for value in coarse.values if value is not None] == [4.0]
        minutes = await history.series("tokens_per_s", 24)
        assert minutes is not None
        assert (minutes.step_s, len(minutes.values)) == (60.0, 1441)
        assert await history.series("unknown", 1) is None

    remembered(place, tell, ask)


def test_steps_are_evenly_chosen_with_both_ends(
    place: Path | str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reader.MAX_STEPS == 500
    monkeypatch.setattr(reader, "MAX_STEPS", 50)

    def tell(history: DashboardHistory) -> None:
        for number in range(1, 54):
            history.record(step(number))

    async def ask(history: DashboardHistory) -> None:
        steps = await history.steps("run-1", limit=10_000)
        numbers = [each.outer_step for each in steps]
        assert len(numbers) == 50
        assert (numbers[0], numbers[-1]) == (1, 53)
        assert {late - early for early, late in itertools.pairwise(numbers)} == {1, 2}
        newest = steps[-1]
        assert (newest.loss, newest.digest, newest.num_members, newest.num_tokens) == (1 / 53, "d53", 2, 30)
        assert [each.outer_step for each in await history.steps("run-1", limit=1)] == [53]
        assert await history.steps("run-2") == ()

    remembered(place, tell, ask)


def test_step_recorded_again_adds_its_new_values_and_counts_once(place: Path | str) -> None:  # noqa: F811
    def tell(history: DashboardHistory) -> None:
        history.record(step(1, loss=math.nan))
        history.record(step(1, phases_s={"reduce": 2.5}, seconds=60.0))
        history.record(step(1, bytes_per_parameter=0.5))
        history.record(step(1, validation_loss=1.25))

    async def ask(history: DashboardHistory) -> None:
        (found,) = await history.steps("run-1")
        assert math.isnan(found.loss)
        assert (found.phases_s, found.seconds, found.bytes_per_parameter) == ({"reduce": 2.5}, 60.0, 0.5)
        assert found.validation_loss == 1.25
        told = [(each.peer_id, each.tokens, each.rounds) for each in await history.contributions("run-1")]
        assert told == [("ada", 15, 1), ("ben", 15, 1)]

    remembered(place, tell, ask)
    remembered(place, tell, ask)


def test_contributions_of_a_node_are_by_run_the_largest_first(place: Path | str) -> None:  # noqa: F811
    def tell(history: DashboardHistory) -> None:
        history.record(step(1))
        history.record(step(2, num_tokens=0))
        history.record(step(1, run="run-2", group=("ada",), num_tokens=2**70))

    async def ask(history: DashboardHistory) -> None:
        found = await history.contributions_of("ada")
        assert [(run, each.tokens, each.rounds) for run, each in found.items()] == [
            ("run-2", 2**53, 1),
            ("run-1", 15, 2),
        ]
        assert await history.contributions_of("eve") == {}

    remembered(place, tell, ask)


def test_refusals_and_happenings_come_newest_first(place: Path | str) -> None:  # noqa: F811
    def tell(history: DashboardHistory) -> None:
        for number in range(150):
            history.record(RefusalFact("run-1", refusal(number)))
            history.record(RefusalFact("run-1", refusal(number, reason="told again")))
            history.record(ChangeEvent(at=NOW + number, kind="join", peer_id=None, words=f"no {number}"))

    async def ask(history: DashboardHistory) -> None:
        refusals = await history.refusals("run-1")
        assert [each.outer_step for each in refusals] == list(range(149, 49, -1))
        assert refusals[0] == refusal(149)
        assert [each.words for each in await history.changes()] == [f"no {number}" for number in range(149, 129, -1)]

    remembered(place, tell, ask)


def test_change_dated_ahead_by_a_wrong_clock_hides_no_later_one(place: Path | str) -> None:  # noqa: F811
    def tell(history: DashboardHistory) -> None:
        for number in range(21):
            at = NOW + number if number else NOW + 300 * DAY_S
            history.record(ChangeEvent(at=at, kind="join", peer_id=None, words=f"no {number}"))

    async def ask(history: DashboardHistory) -> None:
        assert [each.words for each in await history.changes()] == [f"no {number}" for number in range(20, 0, -1)]

    remembered(place, tell, ask)


def test_hostile_names_are_stored_as_plain_data(place: Path | str) -> None:  # noqa: F811
    def tell(history: DashboardHistory) -> None:
        history.record(PresenceFact(NOW - 10, frozenset(HOSTILE)))
        for number, name in enumerate(HOSTILE):
            history.record(SamplesFact(NOW, (SeriesSample(name=name, unit=name, value=float(number)),)))
            history.record(step(1, run=name, digest=name, group=(name,), num_tokens=14, phases_s={name: 1.0}))
            history.record(RefusalFact(name, refusal(1, peer_id=name, name=name, by_peer_id=name, reason=name)))
            history.record(ChangeEvent(at=NOW, kind="run", peer_id=name, words=name))

    async def ask(history: DashboardHistory) -> None:
        for number, name in enumerate(HOSTILE):
            assert len(await history.presence(name)) == 1
            series = await history.series(name, 1)
            assert series is not None
            assert series.values[-1] == number
            (found,) = await history.steps(name)
            assert found.num_members == 1
            (contributed,) = await history.contributions(name)
            assert len(contributed.peer_id) <= 256
            assert [each.tokens for each in (await history.contributions_of(name)).values()] == [7]
            (refused,) = await history.refusals(name)
            assert len(refused.reason) <= 1000
            assert len(refused.peer_id) <= 256
        assert len(await history.changes()) == len(HOSTILE)

    remembered(place, tell, ask)


def test_series_of_a_history_over_its_size_limit_have_only_remaining_buckets(place: Path | str) -> None:  # noqa: F811
    def tell(history: DashboardHistory) -> None:
        history.record(SamplesFact(NOW, (SeriesSample(name="tokens_per_s", unit="tok/s", value=1.0),)))

    async def ask(history: DashboardHistory) -> None:
        for squeeze, widths_s in ((1, (60, 60, 3600)), (2, (60, 3600, 3600))):
            assert history._writer._retention is not None
            history._writer._retention.squeeze = squeeze
            for hours, width_s in zip((2, 24, 48), widths_s, strict=True):
                found = await history.series("tokens_per_s", hours - squeeze / 1e6)
                assert found is not None
                assert found.step_s == width_s

    remembered(place, tell, ask)


def test_series_beyond_the_bound_are_dropped(place: Path | str) -> None:  # noqa: F811
    def tell(history: DashboardHistory) -> None:
        history.record(
            SamplesFact(NOW, tuple(SeriesSample(name=f"s{number:03}", unit="", value=1.0) for number in range(30)))
        )

    async def ask(history: DashboardHistory) -> None:
        assert await history.series("s019", 1) is not None
        assert await history.series("s020", 1) is None

    remembered(place, tell, ask, limits=RetentionLimits(max_series=20))


def test_old_rows_are_deleted_and_older_ones_become_coarser(place: Path | str) -> None:  # noqa: F811
    async def run() -> None:
        clock = Clock()
        limits = RetentionLimits(max_age_s=10 * DAY_S, steps_in_full=10, max_refusals=5, max_changes=5)
        async with DashboardHistory(place, clock=clock, limits=limits, timing=WriterTiming(tidy_s=0.05)) as history:
            history.record(PresenceFact(NOW, frozenset({"old"})))
            history.record(PresenceFact(NOW + 1, frozenset({"new"})))
            history.record(SamplesFact(NOW, (SeriesSample(name="s", unit="", value=1.0),)))
            history.record(step(1, at=NOW, run="over", group=("gone",)))
            for number in range(1, 41):
                validated = 1.0 if number == 2 or number % 5 == 0 else None
                history.record(step(number, at=NOW + 9 * DAY_S, validation_loss=validated))
                history.record(RefusalFact("run-1", refusal(number, at=NOW + 9 * DAY_S + number)))
                history.record(ChangeEvent(at=NOW + 9 * DAY_S, kind="run", peer_id=None, words=str(number)))
            assert await history.flushed(110)
            clock.now = NOW + 10 * DAY_S + 2 * HOUR_S
            async with asyncio.timeout(60):
                while await history.series("s", 10 * 24) is not None or await history.contributions("over"):
                    await asyncio.sleep(0.05)
                while len(await history.changes()) > 5 or len(await history.steps("run-1")) > 20:
                    await asyncio.sleep(0.05)
            assert await history.steps("over") == ()
            assert await history.presence("old") == ()
            assert len(await history.presence("new")) == 1
            numbers = [each.outer_step for each in await history.steps("run-1")]
            assert numbers[-10:] == list(range(31, 41))
            assert numbers[0] == 1
            assert {5, 10, 15, 20, 25, 30} <= set(numbers), "the validated ones, rather than their neighbours"
            assert [each.outer_step for each in await history.refusals("run-1")] == [40, 39, 38, 37, 36]
            # contributions outlast the dropped steps
            assert (await history.contributions_of("ada"))["run-1"].rounds == 40
            assert history.problem is None

    asyncio.run(run())
