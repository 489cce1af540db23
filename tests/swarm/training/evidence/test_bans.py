"""Tests that bans follow from evidence and the run's rules, and that their number is bounded."""

from __future__ import annotations

import pytest
from support.training_swarm import config
from swarm.training.evidence import bans as bans_module
from swarm.training.evidence.bans import Bans, Verdict


def verdict(peer: str, step: int = 3) -> Verdict:
    return Verdict(peer_id=peer, step=step, kind="wrong_reduction", reason="it lied")


def test_ban_is_permanent_by_default() -> None:
    bans = Bans(config())
    assert bans.add(verdict("liar"), b"evidence").until is None
    assert bans.peers(10**6) == {"liar"}
    assert bans.lapse(10**6) == frozenset()


def test_ban_lasts_for_the_runs_ban_steps_and_is_then_forgotten() -> None:
    bans = Bans(config(ban_steps=2))
    assert bans.add(verdict("liar"), b"evidence").until == 5
    assert [bans.peers(step) for step in (4, 5, 6)] == [{"liar"}, {"liar"}, frozenset()]
    assert bans.lapse(5) == frozenset()
    assert bans.lapse(6) == {"liar"}
    assert bans.at(4) == ()


def test_ban_is_prolonged_by_a_later_lie_and_unchanged_by_an_earlier_one() -> None:
    bans = Bans(config(ban_steps=2))
    bans.add(verdict("liar", 3), b"first")
    assert not bans.is_news("liar", 3)
    assert not bans.is_news("liar", 2)
    assert bans.is_news("liar", 4)
    assert bans.is_news("another", 1)
    bans.add(verdict("liar", 4), b"second")
    (ban,) = bans.at(6)
    assert (ban.until, ban.data) == (6, b"second")


def test_permanent_ban_takes_no_more_evidence() -> None:
    bans = Bans(config())
    bans.add(verdict("liar", 3), b"first")
    assert not bans.is_news("liar", 9)


def test_ban_is_not_shown_to_a_member_that_knows_it() -> None:
    bans = Bans(config())
    for peer in ("one", "two"):
        bans.add(verdict(peer), b"evidence")
    assert [ban.verdict.peer_id for ban in bans.unknown_to(["one"], 4)] == ["two"]


def test_evidence_is_bounded_and_drops_the_earliest_lies_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bans_module, "MAX_HELD_EVIDENCE_BYTES", 30)
    bans = Bans(config())
    for step, peer in ((5, "e"), (2, "b"), (9, "i"), (7, "g")):
        bans.add(verdict(peer, step), bytes(10))
    assert bans.peers(10) == {"e", "i", "g"}
    monkeypatch.setattr(bans_module.limits, "MAX_BANS", 2)
    bans.add(verdict("k", 11), b"")
    assert bans.peers(12) == {"i", "k"}
