"""Tests calls and streams between every pair of hosts, from their first contact on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from bench.report import Report
from internet.conftest import OpenLab
from internet.pairs import MAX_DIRECT_S, MAX_SEED_SHARE, OTHERS, Pair, each_pair
from internet.paths import PairMeter

pytestmark = [pytest.mark.internet, pytest.mark.timeout(180)]

NUM_MESSAGES = 128
"""The messages of 256 KiB in the long stream."""
MAX_PAUSE_S = 5.0
QUICK = ("public+NAT", "NAT+NAT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Hold the figures of two hosts. `direct_s` is the time from the first call until most bytes went directly, or None
    if they never did. `seed_share` is that of the long stream after that."""

    pair: Pair
    failures: list[str]
    num_calls: int
    first_call_s: float
    longest_pause_s: float
    num_messages: int
    direct_s: float | None
    seed_share: float


@pytest.fixture(scope="module")
def conversation(request: pytest.FixtureRequest, open_lab: OpenLab, figures: Report) -> Conversation:
    pair: Pair = request.param
    with open_lab() as nodes:
        seed = nodes.seed()
        one, other = nodes.talkers(pair.one, pair.other, peers=seed.public)
        meter = PairMeter(nodes.lab, pair.one, pair.other)
        calling = one.tell("call", peer=other.peer_id, num=10_000, pause_s=0.1, num_bytes=2000)
        talking = one.tell("talk", peer=other.peer_id, seconds=60, pause_s=0.1, num_bytes=2000)
        direct_s = meter.wait_direct(within_s=pair.look_s)
        meter = PairMeter(nodes.lab, pair.one, pair.other)
        drunk = one.tell("drink", peer=other.peer_id, num=NUM_MESSAGES).result()
        shares = meter.shares()
        talked, called = talking.end(), calling.end()
    found = Conversation(
        pair=pair,
        failures=called["failures"],
        num_calls=called["num"],
        first_call_s=called["first_s"],
        longest_pause_s=max(talked["longest_s"], drunk["longest_s"]),
        num_messages=drunk["num"],
        direct_s=direct_s,
        seed_share=shares.seed_share,
    )
    figures.row(
        pair.name,
        first_call_s=found.first_call_s,
        direct_after_s="never" if direct_s is None else direct_s,
        seed_share_of_stream=found.seed_share,
        longest_pause_s=found.longest_pause_s,
    )
    return found


@each_pair("conversation", with_path=False, more=OTHERS, quick=QUICK)
def test_calls_are_answered_and_streams_lose_nothing(conversation: Conversation) -> None:
    assert conversation.failures == []
    assert conversation.num_calls >= 5
    assert conversation.num_messages == NUM_MESSAGES
    assert conversation.longest_pause_s < MAX_PAUSE_S


@each_pair("conversation", with_path=True, more=OTHERS, quick=QUICK)
def test_path_becomes_direct_soon_and_carries_a_long_stream(conversation: Conversation) -> None:
    assert conversation.direct_s is not None
    assert conversation.direct_s <= MAX_DIRECT_S
    assert conversation.seed_share <= MAX_SEED_SHARE
