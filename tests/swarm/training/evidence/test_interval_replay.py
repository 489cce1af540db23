"""Tests that with fresh moments an interval depends only on the state, the lease and the settings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.training_swarm import SyntheticInner
from swarm.training.data.corpus import Corpus
from swarm.training.evidence.interval_audits import IntervalAudits, Validation, replayed
from swarm.training.evidence.wrong_interval import IntervalStart
from swarm.training.inner.inner_loop import InnerLoop, IntervalResult
from swarm.training.inner.interval import Intervals
from swarm.training.inner.one_device import LocalOptions
from swarm.training.inner.optimizers import restart_factor
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.state.lease import LeaseStripe
from swarm_protocol.training_messages import Contribution

MEMBER = Contribution(peer_id="12D3KooWBkZ2WncDBk4LteNor5kfPc5yGvV7WNx27GmkbjkccVtQ", num_tokens=128, num_samples=8)


def run_with(run: RunConfig, *, fresh: bool) -> RunConfig:
    return replace(run, inner=replace(run.inner, fresh_moments=fresh))


def loop_of(run: RunConfig, corpus: Corpus, local: LocalOptions | None = None) -> InnerLoop:
    return InnerLoop(run, build_model(run.model), corpus, local or LocalOptions())


def start_of(run: RunConfig, step: int = 2) -> IntervalStart:
    return IntervalStart(step=step, theta_N=initial_theta(run), stripes=(LeaseStripe(roster=(MEMBER.peer_id,)),))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_interval_computed_once_more_by_another_member_has_the_same_bits(
    tiny_run: RunConfig, tiny_corpus: Corpus, optimizer: str
) -> None:
    run = run_with(replace(tiny_run, inner=replace(tiny_run.inner, optimizer=optimizer)), fresh=True)
    start, trainer, validator = start_of(run), loop_of(run, tiny_corpus), loop_of(run, tiny_corpus)
    for loop, first in ((trainer, 100), (validator, 300)):
        loop.load(start.theta_N)
        loop.train(range(first, first + 20), 10)  # earlier training must not matter
    trainer.load(start.theta_N)
    result = trainer.train(range(8), run.interval_steps, done_steps=run.interval_steps)
    assert result.num_samples == MEMBER.num_samples
    kept_N = validator.flat()
    delta_N = replayed(validator, start, MEMBER, run)
    assert delta_N.norm() > 0
    assert torch.equal(delta_N, start.theta_N - trainer.flat())
    assert torch.equal(validator.flat(), kept_N), "the replay changed the validator's own weights"


def test_interval_depends_on_earlier_ones_without_fresh_moments(tiny_run: RunConfig, tiny_corpus: Corpus) -> None:
    run = run_with(tiny_run, fresh=False)
    start, one, other = start_of(run), loop_of(run, tiny_corpus), loop_of(run, tiny_corpus)
    other.load(start.theta_N)
    other.train(range(100, 120), 10)
    assert not torch.equal(replayed(one, start, MEMBER, run), replayed(other, start, MEMBER, run))


def test_replay_of_a_shortened_interval_ends_where_the_member_stopped(tiny_run: RunConfig, tiny_corpus: Corpus) -> None:
    run = run_with(tiny_run, fresh=True)
    loop, start = loop_of(run, tiny_corpus), start_of(run)
    loop.load(start.theta_N)
    loop.train(range(8), 3, done_steps=run.interval_steps)
    part = replace(MEMBER, num_tokens=96, num_samples=6)
    assert torch.equal(replayed(loop_of(run, tiny_corpus), start, part, run), start.theta_N - loop.flat())


class Endless(SyntheticInner):
    """Take steps until it is told to stop."""

    def train(
        self, sample_ids: Sequence[int], num_steps: int, stop: Callable[[], bool] = lambda: False, **_: object
    ) -> IntervalResult:
        until_s = time.monotonic() + 30.0
        while not stop() and time.monotonic() < until_s:
            time.sleep(0.01)
        return super().train(sample_ids, 0 if stop() else num_steps)


def test_leaving_member_stops_its_replay_of_anothers_interval(
    tiny_run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(tiny_run, fresh=True)
    context = cast("Any", SimpleNamespace(replica=SimpleNamespace(config=run)))
    due = Validation(
        case=cast("Any", SimpleNamespace(member=MEMBER)),
        start=IntervalStart(step=2, theta_N=torch.zeros(3), stripes=(LeaseStripe(roster=(MEMBER.peer_id,)),)),
    )

    async def no_conviction(_evidence: bytes) -> None: ...

    async def main() -> None:
        intervals = Intervals(Endless())
        audits = IntervalAudits(
            context, intervals, convict=no_conviction, is_banned=lambda _: False, on_event=lambda _: None
        )
        running = asyncio.create_task(audits.run(due))
        await asyncio.sleep(0.1)
        assert not running.done()
        intervals.leave()
        async with asyncio.timeout(25.0):
            await running
        await asyncio.to_thread(intervals.close)

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    told = [record for record in caplog.records if "cannot be validated: this member is leaving" in record.message]
    assert [record.levelno for record in told] == [logging.INFO], "leaving was logged as a warning"


def test_learning_rate_warms_up_for_at_most_half_of_an_interval_after_moments_are_reset() -> None:
    assert [restart_factor(step, 100) for step in (0, 9, 10, 50)] == pytest.approx([1 / 11, 10 / 11, 1, 1])
    assert [restart_factor(step, 4) for step in (0, 1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1, 1])
