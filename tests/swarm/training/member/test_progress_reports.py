"""Tests the log of a step, and what members' records report of real rounds."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.training_swarm import NUM_VALUES, SpoiledCodec, Swarm, SyntheticInner, config
from swarm.network.membership import Membership
from swarm.network.memory.memory_link import LinkModel
from swarm.testing import virtual_time
from swarm.training.member.progress_reports import BROKE_PROTOCOL, DOWNWEIGHTED, LEFT_OUT, MemberReports, RoundLog
from swarm.training.member.run_member import RunMember
from swarm.training.round.round_events import GiveUp
from swarm.training.state.proof_reader import MAX_APART, ProofReader
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import OtherHistory, OuterStep, RoundAborted, TrainingEvent
from swarm_protocol import limits
from swarm_protocol.identity import Identity
from swarm_protocol.records import Refusal, TrainerRecord

STEP_S = 0.1
"""The duration that `SyntheticInner` reports."""


@cache
def peer(number: int) -> str:
    return Identity(hashlib.sha256(str(number).encode()).digest()).peer_id


def test_log_adds_up_each_phases_time_over_all_attempts() -> None:
    log = RoundLog()
    log.enter(None, 100.0)
    log.enter("group", 110.0)
    log.enter("reduce", 111.0)
    log.enter("group", 113.0)
    log.enter("group", 113.5)
    log.enter("reduce", 114.0)
    log.enter("commit", 118.0)
    log.enter("apply", 118.25)
    log.add("interval", 9.0)
    log.enter(None, 118.5)
    log.enter(None, 200.0)
    assert log.report(3, {}).phases_s == {
        "interval": 9.0,
        "group": 2.0,
        "reduce": 6.0,
        "commit": 0.25,
        "apply": 0.25,
    }


def test_strangers_whose_links_contradict_nothing_leave_room_for_peers_of_another_history() -> None:
    def link(step: int) -> Any:
        return SimpleNamespace(outer_step=step)

    events = list[TrainingEvent]()
    history = SimpleNamespace(stays_apart=lambda each: each.outer_step == 1)
    strangers = {peer(number): link(10**6) for number in range(MAX_APART)}
    context: Any = SimpleNamespace(apart=strangers, replica=SimpleNamespace(history=history))
    context.other_history = partial(ProofReader.other_history, context)
    reports = MemberReports(peer(0), events.append)
    reports.apart(context)
    assert not events
    assert len(context.apart) < MAX_APART
    context.apart[peer(MAX_APART)] = link(1)
    reports.apart(context)
    assert events == [OtherHistory(step=1, peers=(peer(MAX_APART),))]
    assert context.apart.keys() == {peer(MAX_APART)}


def test_attempts_that_fail_for_one_reason_are_logged_once_a_step_and_each_is_an_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = list[TrainingEvent]()
    reports = MemberReports(peer(0), events.append)
    for step, attempt, reason in ((1, 1, "alone"), (1, 2, "alone"), (1, 3, "late"), (2, 1, "late"), (2, 2, "late")):
        reports.aborted(GiveUp(step=step, attempt=attempt, reason=reason, missing=()))
    assert len(events) == 5
    assert [record.message for record in caplog.records] == [
        "attempt 1 at outer step 1: alone",
        "attempt 3 at outer step 1: late",
        "attempt 1 at outer step 2: late",
    ]


def test_log_reports_the_worst_refusals_one_for_each_peer() -> None:
    log = RoundLog()
    for number in range(limits.MAX_REFUSALS):
        log.refuse(peer(number), f"it keeps {number} %", DOWNWEIGHTED)
    log.refuse(peer(0), "it sent nonsense", BROKE_PROTOCOL)
    log.refuse(peer(0), "it sent more nonsense", BROKE_PROTOCOL)
    log.refuse(peer(0), "too late", LEFT_OUT)
    log.refuse(peer(99), "too late", LEFT_OUT)
    refused = log.report(1, {}).refused
    assert len(refused) == limits.MAX_REFUSALS
    assert refused[:2] == (
        Refusal(peer_id=peer(0), reason="it sent nonsense"),
        Refusal(peer_id=peer(99), reason="too late"),
    )


def test_log_takes_only_new_accusations() -> None:
    log = RoundLog()
    log.refuse_new({peer(0): "old", peer(1): "new"}, {peer(0): "old"})
    assert log.report(1, {}).refused == (Refusal(peer_id=peer(1), reason="new"),)


def test_log_keeps_a_bounded_number_of_refusals() -> None:
    log = RoundLog()
    for number in range(2 * limits.MAX_GROUP_MEMBERS):
        log.refuse(str(number), "too late", LEFT_OUT)
    assert len(log._refused) == limits.MAX_GROUP_MEMBERS


@given(
    reason=st.text(max_size=2 * limits.MAX_REFUSAL_CHARS),
    seconds=st.floats(-1.0, 1e12),
    sent=st.integers(0, 2**60),
    rates=st.lists(st.floats(0, 1e300), max_size=3 * limits.MAX_REPORTED_RATES),
)
def test_log_gives_a_valid_record_for_any_input(reason: str, seconds: float, sent: int, rates: list[float]) -> None:
    log = RoundLog()
    log.refuse(peer(0), reason, BROKE_PROTOCOL)
    log.add("reduce", seconds)
    rates_from = {peer(number): rate for number, rate in enumerate(rates)}
    log.sent(sent)
    record = TrainerRecord(run="r", outer_step=1, state="training", report=log.report(1, rates_from))
    assert TrainerRecord.from_bytes(record.to_bytes()) == record
    assert record.report is not None
    reported = sorted(record.report.rates_from.values())
    assert reported == [min(rate, limits.MAX_LINK_BYTES_PER_S) for rate in sorted(rates)][: limits.MAX_REPORTED_RATES]


async def records_of(swarm: Swarm) -> dict[str, TrainerRecord]:
    network = swarm.internet.network()
    async with Membership(network) as visitor:
        records = await visitor.trainers(swarm.run.run_id)
    await network.close()
    return records


async def phases_over(latency_s: float) -> dict[str, float]:
    """Return the phases of the last step of a run of three, over links with this latency. The synthetic contributions
    lie on a line, where a robust aggregator takes the outer ones for lies."""
    async with Swarm(config(min_group=3, aggregator="mean"), link=LinkModel(latency_s=latency_s)) as swarm:
        for index in range(3):
            await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=STEP_S))
        members = await swarm.finish()
        records = await records_of(swarm)
    for member in members:
        report, event = records[member.peer_id].report, member.of(OuterStep)[-1]
        assert report is not None
        assert records[member.peer_id].num_parameters == NUM_VALUES
        assert report.outer_step == event.step == 3
        assert report.bytes_sent == event.bytes_sent > 0
        assert set(report.phases_s) == {"interval", "group", "reduce", "commit", "apply"}
        assert report.phases_s["interval"] == pytest.approx(5 * STEP_S)
        assert sum(report.phases_s.values()) == pytest.approx(event.seconds, rel=0.02)
        assert sum(report.phases_s.values()) - 5 * STEP_S == pytest.approx(event.round_s, rel=0.02)
        assert report.refused == ()
    last = records[members[0].peer_id].report
    assert last is not None
    return dict(last.phases_s)


@pytest.mark.usefixtures("only_errors_logged")
def test_records_report_phases_of_the_newest_round_that_add_up_to_its_time() -> None:
    near = virtual_time.run(phases_over(0.005))
    far = virtual_time.run(phases_over(0.05))
    # a slice and a result, and a vote: each takes one or two latencies more than before
    assert 0.09 <= far["reduce"] - near["reduce"] <= 0.5
    assert 0.04 <= far["commit"] - near["commit"] <= 0.5


@pytest.mark.usefixtures("only_errors_logged")
def test_records_name_the_sender_of_bad_slices() -> None:
    class Liar(RunMember):
        async def _open_context(self) -> RunContext:
            return replace(await super()._open_context(), codec=SpoiledCodec(lambda data: data[:-1]))

    async def main() -> None:
        seen: dict[str, str] = {}
        async with Swarm(config(min_group=3, outer_steps=1, aggregator="mean")) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}")
            liar = await swarm.join("liar", kind=Liar)
            members = await swarm.finish("m0", "m1", "m2")
            records = await records_of(swarm)
        assert any(member.of(RoundAborted) for member in members)
        for member in members:
            report = records[member.peer_id].report
            assert report is not None
            seen.update({each.peer_id: each.reason for each in report.refused})
        assert list(seen) == [liar.peer_id]
        assert "bad slice" in seen[liar.peer_id] or "bad result" in seen[liar.peer_id]

    virtual_time.run(main())


@pytest.mark.usefixtures("only_errors_logged")
def test_records_name_the_member_whose_contribution_was_downweighted() -> None:
    class Loud(SyntheticInner):
        def flat(self, where: slice = slice(None)):  # type: ignore[no-untyped-def]
            return -1000.0 * super().flat(where)

    async def main() -> None:
        async with Swarm(
            config(min_group=4, outer_steps=1, aggregator="centered_clip", pre_aggregation="none")
        ) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}")
            loud = await swarm.join("loud", inner=Loud())
            members = await swarm.finish()
            records = await records_of(swarm)
        for member in members:
            report = records[member.peer_id].report
            assert report is not None
            reasons = {each.peer_id: each.reason for each in report.refused}
            assert member.peer_id not in reasons
            assert member is loud or "of its weight in the part" in reasons[loud.peer_id]

    virtual_time.run(main())
