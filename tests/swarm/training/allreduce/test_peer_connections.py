"""Tests that a member's bandwidth is measured in reductions and sets the size of its part."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest
from support.training_swarm import Swarm, SyntheticInner, assert_equal_steps, config
from swarm.testing import virtual_time
from swarm.training.allreduce import parts as part_sizing
from swarm.training.allreduce.parts import MIN_AHEAD_FRAMES, leaf_values
from swarm.training.allreduce.peer_connections import MIN_BYTES, BandwidthMeter, MeteredStream
from swarm.training.trainer_events import OuterStep
from swarm_protocol import limits

pytestmark = pytest.mark.usefixtures("only_errors_logged")

BANDWIDTH_BYTES_PER_S = 1.28e6
NUM_STEPS = 8
LAST_STEPS = (6, 7, 8)
NUM_VALUES = 320_000


def test_meter_gives_the_slower_direction_for_the_recent_number_of_peers() -> None:
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


def test_meter_averages_over_reductions_and_forgets_peers_that_left() -> None:
    meter = BandwidthMeter()
    for rate in (100.0, 200.0):
        meter.begin(["a", "b"])
        meter.measured("a", rate)
    meter.begin(["a"])
    assert meter.bytes_per_s == 150
    assert meter.rate_from("a") == 0
    meter.begin(["b"])
    assert meter.bytes_per_s == 0


def test_meter_stays_within_the_bounds_of_a_report_when_peers_lie() -> None:
    meter = BandwidthMeter()
    meter.begin(["a", "b"])
    for peer in ("a", "b"):
        meter.reported(peer, int(limits.MAX_LINK_BYTES_PER_S))
    assert meter.bytes_per_s == limits.MAX_LINK_BYTES_PER_S


def test_meter_does_not_count_a_slow_connection_of_another_member_as_its_own() -> None:
    meter = BandwidthMeter()
    meter.begin(["a", "b", "c"])
    for peer, rate in (("a", 10), ("b", 100), ("c", 100)):
        meter.reported(peer, rate)
    assert meter.bytes_per_s == 3 * 100


class Dripping:
    """Yield one frame each second."""

    async def receive(self) -> bytes:
        await asyncio.sleep(1.0)
        return bytes(MIN_BYTES // 2)


def test_metered_stream_measures_its_first_frames_once_there_are_enough() -> None:
    async def main() -> None:
        rates: list[float] = []
        stream = MeteredStream(cast(Any, Dripping()), rates.append)
        await stream.receive()
        assert not rates
        await stream.receive()
        assert rates == [MIN_BYTES / 2.0]
        for _ in range(40):
            await stream.receive()
        assert len(rates) == MIN_AHEAD_FRAMES - 1, "later frames wait for other members and are not measured"

    virtual_time.run(main())


def run_with_a_slower_member(slowdown: float) -> tuple[list[int], float]:
    """Return the part sizes of the last group, the slow member's last, and the seconds that the last steps took that
    member."""

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


def test_part_is_a_quarter_and_rounds_are_faster_when_a_member_has_a_quarter_of_the_bandwidth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (*others, slow), seconds = run_with_a_slower_member(4.0)
    assert slow == pytest.approx(sum(others) / 3 / 4, rel=0.6)  # its drawn audits count as its traffic, too
    monkeypatch.setattr(part_sizing, "NOISE", math.inf)
    equal, equal_seconds = run_with_a_slower_member(4.0)
    assert max(equal) - min(equal) <= leaf_values(NUM_VALUES)
    assert seconds < equal_seconds  # usually three quarters of it; the audited leaves are drawn


def test_parts_are_equal_when_members_have_equal_bandwidths() -> None:
    parts, _ = run_with_a_slower_member(1.0)
    assert max(parts) - min(parts) <= leaf_values(NUM_VALUES)


def test_meter_starts_at_the_owners_limit_and_never_exceeds_it() -> None:
    assert BandwidthMeter().bytes_per_s == 0
    assert BandwidthMeter(2e6).bytes_per_s == 2_000_000
    meter = BandwidthMeter(2e6)
    for _ in range(2):
        meter.begin(["a", "b"])
        meter.measured("a", 5e6)
        meter.measured("b", 5e6)
    assert meter.bytes_per_s == 2_000_000, "the measured rate exceeds the owner's limit"
    slow = BandwidthMeter(1e9)
    for _ in range(2):
        slow.begin(["a"])
        slow.measured("a", 1e5)
    assert slow.bytes_per_s == 100_000
