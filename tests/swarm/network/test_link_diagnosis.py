"""Slow senders, receivers and links are named, and equal ones never are, in any random draw."""

from __future__ import annotations

import asyncio
import functools
import logging

import numpy as np
import pytest
from support.training_swarm import Swarm, SyntheticInner, config, identity_of
from swarm.network.link_diagnosis import MAX_FOUND, NUM_CONFIRMATIONS, LinkWatch, SlowLink, slow_links
from swarm.network.memory.memory_link import LinkModel
from swarm.testing import virtual_time
from swarm_protocol.records import RoundReport

Rates = dict[str, dict[str, float]]
USUAL = 1e6


def _rates(num_members: int, rng: np.random.Generator, sigma: float = 0.1) -> Rates:
    names = [f"m{index}" for index in range(num_members)]
    return {
        receiver: {sender: USUAL * float(np.exp(rng.normal(0, sigma))) for sender in names if sender != receiver}
        for receiver in names
    }


def _slower(rates: Rates, factor: float, *, sender: str = "", receiver: str = "") -> Rates:
    return {
        each: {
            other: rate / factor if sender in {"", other} and receiver in {"", each} else rate
            for other, rate in row.items()
        }
        for each, row in rates.items()
    }


def _named(found: tuple[SlowLink, ...]) -> list[tuple[str, str, str]]:
    return [(each.kind, each.sender, each.receiver) for each in found]


@pytest.mark.parametrize("sigma", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("num_members", [2, 3, 4, 6, 10, 16])
def test_equal_links_raise_no_alarm_in_any_of_many_draws(num_members: int, sigma: float) -> None:
    rng = np.random.default_rng(num_members)
    num_draws = 4000 // num_members
    assert [slow_links(_rates(num_members, rng, sigma)) for _ in range(num_draws)] == [()] * num_draws


@pytest.mark.parametrize("num_members", [3, 5, 16])
def test_links_of_busy_machines_raise_no_alarm_that_lasts(num_members: int) -> None:
    """One transfer in fifty takes ten times as long: some stand out at each moment, and none for long."""
    rng, watch, num_single = np.random.default_rng(1), LinkWatch(), 0
    for step in range(1, 300):
        rates = _rates(num_members, rng, 0.3)
        for row in rates.values():
            for sender in row:
                row[sender] /= 10 if rng.random() < 0.02 else 1
        num_single += bool(slow_links(rates))
        watch.update(_reports(step, rates))
        assert watch.named == ()
    assert num_single > 0


@pytest.mark.parametrize(("num_members", "factor"), [(3, 15.0), (4, 9.0), (6, 6.0), (16, 5.0)])
def test_row_column_and_cell_name_a_sender_a_receiver_and_a_link(num_members: int, factor: float) -> None:
    rng = np.random.default_rng(7)
    for _ in range(100):
        rates = _rates(num_members, rng)
        assert _named(slow_links(_slower(rates, factor, sender="m1"))) == [("sender", "m1", "")]
        assert _named(slow_links(_slower(rates, factor, receiver="m2"))) == [("receiver", "", "m2")]
        if num_members > 3:  # of three links, one is half of its sender's
            found = slow_links(_slower(rates, factor, sender="m0", receiver="m2"))
            assert _named(found) == [("link", "m0", "m2")]
            assert found[0].slowdown == pytest.approx(factor, rel=0.6)


def test_several_that_are_slow_are_all_named_the_slowest_first() -> None:
    rates = _rates(8, np.random.default_rng(3))
    rates = _slower(_slower(rates, 6.0, sender="m1"), 20.0, receiver="m2")
    rates = _slower(rates, 60.0, sender="m5", receiver="m6")
    assert _named(slow_links(rates)) == [("link", "m5", "m6"), ("receiver", "", "m2"), ("sender", "m1", "")]
    assert (
        len(
            slow_links(
                {
                    r: {s: 1e5 if (int(r[1:]) + int(s[1:])) % 5 == 0 else 1e6 for s in row}
                    for r, row in _rates(16, np.random.default_rng(3)).items()
                }
            )
        )
        <= MAX_FOUND
    )


def test_fast_links_are_not_named_and_unknown_ones_do_not_count() -> None:
    rates = _rates(6, np.random.default_rng(5))
    fast = {receiver: {sender: 1000 * rate for sender, rate in row.items()} for receiver, row in rates.items()}
    assert slow_links(_slower(fast, 50.0, sender="m1")) == ()
    assert slow_links({}) == slow_links({"m0": {}}) == slow_links({"m0": {"m1": 0.0}}) == ()
    slow = _slower(rates, 5.0, sender="m1")
    slow["m2"]["m3"] = slow["m4"]["m4"] = 0.0
    assert _named(slow_links(slow)) == [("sender", "m1", "")]


def test_liar_names_only_links_to_itself() -> None:
    rates = _rates(6, np.random.default_rng(5))
    rates["m0"] = {"m1": 1.0, **{sender: rate for sender, rate in rates["m0"].items() if sender != "m1"}}
    assert _named(slow_links(rates)) == [("link", "m1", "m0")]
    rates["m0"] = dict.fromkeys(rates["m0"], 1.0)
    assert _named(slow_links(rates)) == [("receiver", "", "m0")]


def _reports(step: int, rates: Rates) -> dict[str, RoundReport]:
    return {
        _peer(receiver): RoundReport(
            outer_step=step, bytes_sent=0, rates_from={_peer(sender): rate for sender, rate in row.items()}
        )
        for receiver, row in rates.items()
    }


@functools.cache
def _peer(name: str) -> str:
    return identity_of(name).peer_id


def test_watch_names_what_lasts_forgets_what_is_over_and_follows_most_members() -> None:
    rng, watch = np.random.default_rng(5), LinkWatch()

    def report(step: int, rates: Rates) -> None:
        watch.update(_reports(step, rates))

    for step in range(1, NUM_CONFIRMATIONS + 1):
        assert watch.named == ()
        report(step, _slower(_rates(5, rng), 5.0, sender="m1"))
        report(step, _rates(5, rng))  # the same step again
    assert _named(watch.named) == [("sender", _peer("m1"), "")]
    (slow,) = watch.named
    assert slow.words({_peer("m1"): "attic"}.__getitem__).startswith("attic sends ")
    liar = RoundReport(outer_step=2**40, bytes_sent=0)
    watch.update({_peer("m0"): liar, **{_peer(f"m{n}"): RoundReport(outer_step=4, bytes_sent=0) for n in (1, 2, 3)}})
    assert _named(watch.named) == [("sender", _peer("m1"), "")]
    report(9, _rates(5, rng))
    assert watch.named == ()
    watch.update({})


def test_members_reports_of_real_rounds_name_the_slow_link_between_two(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="swarm")

    async def main() -> None:
        link = LinkModel(latency_s=0.005, bandwidth_bytes_per_s=4e6)
        async with Swarm(config(min_group=5, outer_steps=7, aggregator="mean"), link=link) as swarm:
            for index in range(5):
                await swarm.join(f"m{index}", inner=SyntheticInner(num_values=400_000))
            slow = LinkModel(latency_s=0.005, bandwidth_bytes_per_s=4e5)
            swarm.internet.link(_peer("m1"), _peer("m3"), slow, back=link)
            watch = LinkWatch()
            members = list(swarm.members.values())
            while not all(member.task is not None and member.task.done() for member in members):
                await asyncio.sleep(0.05)
                reports = {member.network.peer_id: member.trainer.report for member in members}
                watch.update({peer: report for peer, report in reports.items() if report is not None})
            assert _named(watch.named) == [("link", _peer("m1"), _peer("m3"))]
            await swarm.finish()

    virtual_time.run(main())
