"""A member's bandwidth is measured in reductions, and decides how large its part is."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any, cast

import pytest
from support.training_swarm import Swarm, SyntheticInner, assert_equal_steps, config
from swarm.testing import virtual_time
from swarm.training.allreduce import parts as part_sizing
from swarm.training.allreduce.parts import MIN_AHEAD_FRAMES, leaf_values
from swarm.training.allreduce.peer_connections import MIN_BYTES, BandwidthMeter, MeteredStream
from swarm.training.trainer_events import OuterStep
from swarm_protocol.commit_messages import MAX_BYTES_PER_S

BANDWIDTH_BYTES_PER_S = 1.28e6
NUM_STEPS = 8
LAST_STEPS = (6, 7, 8)
NUM_VALUES = 320_000


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="swarm")


def test_meter_gives_the_slower_way_with_as_many_others_as_lately() -> None:
    meter = BandwidthMeter()
    assert meter.bytes_per_s == 0
    meter.begin(["a", "b"])
    for peer, rate in (("a", 100.0), ("b", 300.0)):
        meter.measured(peer, rate)
    assert meter.rate_from("a") == 100
    meter.begin(["a", "b"])
    assert meter.bytes_per_s == 2 * 200
    meter.reported("a", 150)
    assert meter.bytes_per_s == 2 * 150
    meter.reported("b", 0)
    assert meter.bytes_per_s == 2 * 150


def test_meter_averages_over_reductions_and_forgets_who_is_gone() -> None:
    meter = BandwidthMeter()
    for rate in (100.0, 200.0):
        meter.begin(["a", "b"])
        meter.measured("a", rate)
    meter.begin(["a"])
    assert meter.bytes_per_s == 150
    assert meter.rate_from("a") == 0
    meter.begin(["b"])
    assert meter.bytes_per_s == 0


def test_meter_of_what_liars_report_stays_within_what_a_report_holds() -> None:
    meter = BandwidthMeter()
    meter.begin(["a", "b"])
    for peer in ("a", "b"):
        meter.reported(peer, MAX_BYTES_PER_S)
    assert meter.bytes_per_s == MAX_BYTES_PER_S


def test_meter_does_not_take_the_slow_connection_of_another_member_for_its_own() -> None:
    meter = BandwidthMeter()
    meter.begin(["a", "b", "c"])
    for peer, rate in (("a", 10), ("b", 100), ("c", 100)):
        meter.reported(peer, rate)
    assert meter.bytes_per_s == 3 * 100


class Dripping:
    """Yields a frame each second."""

    async def receive(self) -> bytes:
        await asyncio.sleep(1.0)
        return bytes(MIN_BYTES // 2)


def test_metered_stream_measures_the_first_frames_once_they_are_enough() -> None:
    async def main() -> None:
        rates: list[float] = []
        stream = MeteredStream(cast(Any, Dripping()), rates.append)
        await stream.receive()
        assert not rates
        await stream.receive()
        assert rates == [MIN_BYTES / 2.0]
        for _ in range(40):
            await stream.receive()
        assert len(rates) == MIN_AHEAD_FRAMES - 1, "later frames wait for others"

    virtual_time.run(main())


def run_with_a_slower_member(slowdown: float) -> tuple[list[int], float]:
    """Return the part sizes of the last group, the slow member's last, and how long the last steps took that member."""

    async def main() -> tuple[list[int], float]:
        async with Swarm(config(min_group=4, outer_steps=NUM_STEPS, aggregator="mean")) as swarm:
            for index in range(4):
                rate = BANDWIDTH_BYTES_PER_S / (slowdown if index == 3 else 1.0)
                await swarm.join(f"m{index}", inner=SyntheticInner(num_values=NUM_VALUES), bytes_per_s=rate)
            members = await swarm.finish()
            assert_equal_steps(members, NUM_STEPS)
            replica = members[0].trainer.replica
            assert replica is not None
            assert replica.proof is not None
            group = replica.proof.origin
            parts = dict(zip(group.peer_ids, group.part_values, strict=True))
            seconds = {event.step: event.seconds for event in members[3].of(OuterStep)}
            return [parts[member.peer_id] for member in members], sum(seconds[step] for step in LAST_STEPS)

    return virtual_time.run(main())


def test_member_with_a_quarter_of_the_bandwidth_gets_a_quarter_of_a_part_and_rounds_are_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (*others, slow), seconds = run_with_a_slower_member(4.0)
    assert slow == pytest.approx(sum(others) / 3 / 4, rel=0.6)  # what it audits, drawn, counts as its traffic, too
    monkeypatch.setattr(part_sizing, "NOISE", math.inf)
    equal, equal_seconds = run_with_a_slower_member(4.0)
    assert max(equal) - min(equal) <= leaf_values(NUM_VALUES)
    assert seconds < equal_seconds  # three quarters of it at most times; which leaves are audited is drawn


def test_members_with_equal_bandwidths_get_equal_parts() -> None:
    parts, _ = run_with_a_slower_member(1.0)
    assert max(parts) - min(parts) <= leaf_values(NUM_VALUES)


def test_meter_begins_with_the_limit_and_keeps_within_it() -> None:
    assert BandwidthMeter().bytes_per_s == 0
    assert BandwidthMeter(2e6).bytes_per_s == 2_000_000
    meter = BandwidthMeter(2e6)
    for _ in range(2):
        meter.begin(["a", "b"])
        meter.measured("a", 5e6)
        meter.measured("b", 5e6)
    assert meter.bytes_per_s == 2_000_000, "it is told more than its owner lends"
    slow = BandwidthMeter(1e9)
    for _ in range(2):
        slow.begin(["a"])
        slow.measured("a", 1e5)
    assert slow.bytes_per_s == 100_000
