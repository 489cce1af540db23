"""What all that protects a run from liars costs beside its training: CPU time of a step, and bytes that members send.

    .venv/bin/python -m pytest tests/bench/test_bench_trust_cost.py -m bench -s

Four members train the default model with the default settings, validators at a rate of 5 %, and held-out scores, on a
simulated network in one process. Time is the CPU time of threads inside each feature, of the outermost where they are
nested, as a share of the process's whole CPU time from the first step's end on. Commitments, audits and locks cannot be
turned off, so bytes are counted by kind: of a member's bytes for a step, all that is not slices, their copies at
backups or results counts as trust's, the reports and groups that any round has included. A second run without
validators and scores is beside it. Bytes are the same under load, and depend on the sizes of vector and group: the
second test counts them for several.

A validator's interval is in the table, and not in the sum: it takes the place of its own interval, so that no step
takes longer and the run gives up 5 % of its training. The shares hold for the default interval of 20 inner steps of
1.1 million parameters on one core; longer intervals make them smaller.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import pytest
import torch
from bench.report import Report, aim
from support.training_swarm import Swarm, SyntheticInner, assert_equal_steps, config
from swarm.testing import virtual_time
from swarm.training.allreduce import audit, committed_slices
from swarm.training.allreduce.audit import Auditing
from swarm.training.allreduce.part_streams import PartStreams
from swarm.training.evidence import interval_audits, wrong_interval
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.inner.interval import prepare
from swarm.training.member import held_out_effects, reductions, round_driver
from swarm.training.member.peer_calls import TakenReports, cast_vote, send_report
from swarm.training.member.progress_reports import RoundLog
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import InnerConfig
from swarm.training.state.certificate import RunSignatures
from swarm.training.trainer_events import OuterStep

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

NUM_MEMBERS = 4
NUM_STEPS = 4
MOST_TIME, MOST_BYTES = 0.05, 0.02
SIGNATURES = [name for name in vars(RunSignatures) if name.startswith(("sign_", "check_", "read_"))]
FEATURES: dict[str, list[tuple[Any, str]]] = {
    "commitments": [(reductions, "committed_tree"), (committed_slices.MadePart, "check")],
    "audits": [
        (audit, "hashed_part"),
        (audit.Auditing, "_committed"),
        (audit.Auditing, "_lies"),
        (committed_slices.MadePart, "slices_of"),
    ],
    "signatures, votes and locks": [(RunSignatures, name) for name in SIGNATURES],
    "held-out scores": [(held_out_effects, "_effects"), (committed_slices.MadePart, "values_of")],
    "validators": [(interval_audits, "replayed"), (wrong_interval, "likeness")],
}


@dataclass
class CpuTimes:
    """Measure CPU seconds by feature. A thread's time counts for the outermost feature that it is in."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    inside: threading.local = field(default_factory=threading.local)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def counted(self, feature: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            if getattr(self.inside, "yes", False):
                return function(*arguments, **options)
            self.inside.yes, since = True, time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.inside.yes = False
                with self.lock:
                    self.seconds[feature] += time.thread_time() - since

        return timed

    @contextmanager
    def watching(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for feature, places in FEATURES.items():
                for owner, name in places:
                    patch.setattr(owner, name, self.counted(feature, getattr(owner, name)))
            yield


class ByteKinds:
    """Count the bytes that all members send for their steps by kind, as `OuterStep.bytes_sent` counts them."""

    def __init__(self) -> None:
        self.sent: defaultdict[str, int] = defaultdict(int)
        self._kind = ContextVar("kind", default="payload")

    @contextmanager
    def watching(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        send, opened = PartStreams.send, PartStreams.open

        async def counted(streams: PartStreams, stream: Any, data: Any) -> None:
            self.sent[self._kind.get()] += len(data)
            await send(streams, stream, data)

        @asynccontextmanager
        async def counted_open(streams: PartStreams, peer: str, opening: Any) -> AsyncIterator[Any]:
            if self._kind.get() == "payload":  # the opening of an audit counts as part of the audit
                size = len(opening.to_bytes())
                self.sent["openings"] += size
                self.sent["payload"] -= size
            async with opened(streams, peer, opening) as stream:
                yield stream

        def counted_messages(log: RoundLog, num_bytes: int) -> None:
            if self._kind.get() != "payload":  # whose bytes are counted above
                self.sent[self._kind.get()] += num_bytes
            log.bytes_sent += num_bytes

        with monkeypatch.context() as patch:
            patch.setattr(PartStreams, "send", counted)
            patch.setattr(PartStreams, "open", counted_open)
            for name in ("answer", "_ask"):
                patch.setattr(Auditing, name, self._of_kind("audits", getattr(Auditing, name)))
            patch.setattr(RoundLog, "sent", counted_messages)
            patch.setattr(TakenReports, "sign", self._of_kind("groups", TakenReports.sign))
            patch.setattr(round_driver, "cast_vote", self._of_kind("votes", cast_vote))
            patch.setattr(round_driver, "send_report", self._of_kind("reports", send_report))
            yield

    def _of_kind(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        async def marked(*arguments: Any) -> Any:
            token = self._kind.set(kind)
            try:
                return await method(*arguments)
            finally:
                self._kind.reset(token)

        return marked

    def of_trust(self) -> float:
        """Return which share of the bytes is neither slices, their copies at backups, nor results."""
        return 1 - self.sent["payload"] / sum(self.sent.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Hold CPU seconds by feature in `times`, CPU seconds of the process in `cpu_s`, and the bytes of a member in a
    step in `bytes_sent`."""

    times: dict[str, float]
    cpu_s: float
    bytes_sent: float

    def share(self, feature: str) -> float:
        return self.times.get(feature, 0.0) / self.cpu_s


async def _cost(run: RunConfig, times: CpuTimes) -> Cost:
    async with Swarm(run) as swarm:
        for index in range(NUM_MEMBERS):
            setup = await asyncio.to_thread(prepare, run)
            assert isinstance(setup.inner, InnerLoop)
            await swarm.join(f"m{index}", setup=setup)
        first = swarm.members["m0"]
        while not first.of(OuterStep):
            await asyncio.sleep(0.05)
        times.seconds.clear()
        since = time.process_time()
        members = await swarm.finish(timeout_s=1500)
        cpu_s = time.process_time() - since
        assert_equal_steps(members, NUM_STEPS)
        steps = [event for member in members for event in member.of(OuterStep)]
        assert all(len(event.group) == NUM_MEMBERS for event in steps), "a member was left out"
        return Cost(
            times=dict(times.seconds),
            cpu_s=cpu_s,
            bytes_sent=sum(event.bytes_sent for event in steps) / len(steps),
        )


def test_trust_costs_under_a_twentieth_of_a_step_and_a_fiftieth_of_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    inner, shown = InnerConfig(fresh_moments=True), Report(f"Cost of trust, {NUM_MEMBERS} members, the default model")
    runs = {
        "all": RunConfig(name="bench", outer_steps=NUM_STEPS, min_group=NUM_MEMBERS, validation_rate=0.05, inner=inner),
        "less": RunConfig(
            name="bench",
            outer_steps=NUM_STEPS,
            min_group=NUM_MEMBERS,
            held_out_scores=0,
            discount_low_scores=False,
            inner=inner,
        ),
    }
    costs, kinds = {}, {name: ByteKinds() for name in runs}
    for name, run in runs.items():
        times = CpuTimes()
        with times.watching(monkeypatch), kinds[name].watching(monkeypatch):
            costs[name] = asyncio.run(_cost(run, times))
        cost = costs[name]
        row = "with validators and scores" if name == "all" else "without"
        shown.row(
            row,
            **{f"{feature.replace(' ', '_')}_percent": 100 * cost.share(feature) for feature in FEATURES},
            other_bytes_percent=100 * kinds[name].of_trust(),
            sent_KB=cost.bytes_sent / 1e3,
            step_cpu_s=cost.cpu_s / (NUM_STEPS - 1) / NUM_MEMBERS,
        )
    shown.show()
    cost = costs["all"]
    of_time = sum(cost.share(feature) for feature in FEATURES if feature != "validators")
    of_bytes = kinds["all"].of_trust()
    assert cost.times["held-out scores"] > 0
    assert cost.times["audits"] > 0
    assert "held-out scores" not in costs["less"].times
    assert of_time < 3 * MOST_TIME
    assert of_bytes < 5 * MOST_BYTES
    aim(under_5_percent_of_the_time=of_time < MOST_TIME, under_2_percent_of_the_bytes=of_bytes < MOST_BYTES)


@pytest.mark.parametrize(
    ("num_members", "num_values"),
    [(4, 1_100_000), (5, 1_100_000), (8, 1_100_000), (10, 1_100_000), (4, 4_000_000), (8, 4_000_000)],
)
def test_bytes_of_trust_by_kind(num_members: int, num_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, num_steps = ByteKinds(), 2

    async def main() -> float:
        async with Swarm(config(min_group=num_members, outer_steps=num_steps, aggregator="mean")) as swarm:
            for index in range(num_members):
                await swarm.join(f"m{index}", inner=SyntheticInner(num_values=num_values))
            members = await swarm.finish()
            return float(sum(event.bytes_sent for member in members for event in member.of(OuterStep)))

    with kinds.watching(monkeypatch):
        total = virtual_time.run(main())
    # votes that came too late, and the groups that admit members, belong to no step
    assert sum(kinds.sent.values()) == pytest.approx(total, rel=0.01), "the kinds must add up to all bytes"
    shown = Report(f"Bytes of trust, {num_members} members, {num_values:,} values")
    percents = {kind: 100 * count / sum(kinds.sent.values()) for kind, count in kinds.sent.items() if kind != "payload"}
    shown.row("percent of all", **percents, together=sum(percents.values()))
    shown.show()
    assert sum(percents.values()) < 100 * 5 * MOST_BYTES
    aim(under_2_percent_of_the_bytes=sum(percents.values()) < 100 * MOST_BYTES)
