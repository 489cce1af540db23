"""The frames that a side keeps to send again, without copies and no longer than necessary, and the count of received
ones.
"""

from __future__ import annotations

import pytest
from swarm.network import framing
from swarm.network.libp2p.kept_frames import ReceivedFrames, SentFrames
from swarm.network.peer_budgets import UnreadBudget
from swarm_protocol.errors import PeerViolation


def test_frames_are_sent_again_from_the_first_missing_one() -> None:
    sent = SentFrames("peer", UnreadBudget())
    for index in range(5):
        sent.add((bytes([index]),))
    sent.acknowledge(2)
    assert list(sent.to_resend(3)) == [(b"\x03",), (b"\x04",)]
    assert list(sent.to_resend(3)) == [(b"\x03",), (b"\x04",)]
    assert list(sent.to_resend(5)) == []


@pytest.mark.parametrize("num_received", [1, 4, 2**63])
def test_impossible_frame_number_is_a_violation(num_received: int) -> None:
    sent = SentFrames("peer", UnreadBudget())
    for _ in range(3):
        sent.add((b"frame",))
    sent.acknowledge(2)
    with pytest.raises(PeerViolation):
        sent.to_resend(num_received)


def test_acknowledgement_of_more_than_was_sent_is_a_violation() -> None:
    sent = SentFrames("peer", UnreadBudget())
    sent.add((b"frame",))
    with pytest.raises(PeerViolation):
        sent.acknowledge(2)


def test_streams_over_a_peer_s_budget_keep_nothing_and_free_what_they_had() -> None:
    budget = UnreadBudget(max_peer_bytes=3 * framing.cost(1000))
    one, other = SentFrames("peer", budget), SentFrames("peer", budget)
    for sent in (one, one, other):
        sent.add((bytes(1000),))
    assert one.can_resend
    assert other.can_resend
    other.add((bytes(1000),))
    assert one.can_resend
    assert not other.can_resend
    other.add((bytes(1000),))
    assert budget.num_bytes == 2 * framing.cost(1000)
    other.acknowledge(3)  # they did arrive
    with pytest.raises(PeerViolation):
        other.acknowledge(1)
    one.drop()
    assert budget.num_bytes == 0


def test_each_received_frame_is_acknowledged_once() -> None:
    received = ReceivedFrames()
    assert received.count(10) == framing.cost(10)
    assert received.count(5) == received.unacknowledged_cost == framing.cost(10) + framing.cost(5)
    assert received.acknowledgement() == framing.acknowledgement(2)
    assert received.unacknowledged_cost == 0
    assert received.count(1) == framing.cost(1)
    assert received.acknowledgement() == framing.acknowledgement(1)
    assert received.num_frames == 3


def test_received_bytes_progress_with_a_frame_or_a_piece_of_one() -> None:
    received = ReceivedFrames()
    assert not received.has_progressed(0)
    assert received.has_progressed(7)
    assert not received.has_progressed(7)
    received.count(7)
    assert received.has_progressed(0)
    assert not received.has_progressed(0)
