"""Tests how spot checks change a server's reputation, for how long, and how routing uses it."""

from __future__ import annotations

import pytest
from support.plain_records import serve_record
from swarm.router.routing import RoutingContext, find_chain
from swarm.trust import reputation
from swarm.trust.reputation import BAR_S, DISPUTED_HALF_LIFE_S, PASSED_HALF_LIFE_S, Reputation, TrackRecord
from swarm_protocol.identity import Identity

NOW = 1_700_000_000.0
PEERS = [Identity(bytes([number]) * 32).peer_id for number in range(1, 6)]
SERVERS = {
    peer_id: serve_record(model="m", revision="r", decode_ms_per_block=10.0, free_kv_tokens=10_000) for peer_id in PEERS
}


def chosen(known: Reputation, salt: str = "s", now: float = NOW) -> str:
    """Return the server to which a session is routed when all cost the same."""
    trust = known.for_routing(SERVERS, now, salt)
    context = RoutingContext(
        rtt_ms={}, load={}, avoid=trust.avoided, barred=trust.barred, salt=salt, cost_factors=trust.cost_factors
    )
    return find_chain(SERVERS, 0, 4, context).hops[0].peer_id


def test_server_that_passed_checks_is_preferred_and_newcomers_are_still_asked() -> None:
    known = Reputation()
    for _ in range(5):
        known.note(PEERS[3], "passed", NOW)
    asked = [chosen(known, f"session {number}") for number in range(400)]
    assert asked.count(PEERS[3]) > 320
    assert all(asked.count(peer) > 2 for peer in PEERS), "one session in eight must go to any server"


def test_server_that_lied_is_barred_for_a_month_and_then_counts_as_a_stranger() -> None:
    known = Reputation()
    for _ in range(50):
        known.note(PEERS[0], "passed", NOW)
    known.note(PEERS[0], "failed", NOW)
    assert PEERS[0] not in {chosen(known, f"{number}") for number in range(100)}
    assert known.for_routing(PEERS, NOW + BAR_S - 1, "").barred == {PEERS[0]}
    after = known.for_routing(PEERS, NOW + BAR_S + 1, "salt")
    assert after.barred == frozenset()
    assert known.track_records[PEERS[0]].cost_factor(NOW + BAR_S + 1) == 1.0


def test_disputes_lower_trust_in_both_servers_bar_nobody_and_fade() -> None:
    known = Reputation()
    for peer_id in PEERS[:2]:
        known.note(peer_id, "disputed", NOW)
    trust = known.for_routing(PEERS, NOW, "salt")
    assert not trust.barred
    assert not trust.avoided
    assert known.track_records[PEERS[0]].cost_factor(NOW) > 1
    for _ in range(2):
        known.note(PEERS[0], "disputed", NOW)
    assert known.for_routing(PEERS, NOW, "").avoided == {PEERS[0]}
    assert not known.for_routing(PEERS, NOW + DISPUTED_HALF_LIFE_S, "").avoided


def test_passed_checks_fade() -> None:
    standing = TrackRecord(at=NOW).after("passed", NOW)
    assert standing.faded(NOW + PASSED_HALF_LIFE_S).num_passed == pytest.approx(0.5)


def test_reputation_is_read_back_equal_and_invalid_ones_are_refused() -> None:
    known = Reputation()
    for peer_id, outcome in zip(PEERS, ("passed", "failed", "disputed"), strict=False):
        known.note(peer_id, outcome, NOW)  # type: ignore[arg-type]
    assert Reputation.from_dict(known.to_dict()).track_records == known.track_records
    for bad in (
        {"x": (0, 0, 0, 0)},
        {PEERS[0]: (0, 0)},
        {PEERS[0]: (-1, 0, 0, 0)},
        {PEERS[0]: (float("nan"), 0, 0, 0)},
    ):
        with pytest.raises((ValueError, TypeError)):
            Reputation.from_dict(bad)


def test_liars_are_forgotten_last_when_there_are_too_many_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reputation, "MAX_PEERS", 3)
    known = Reputation()
    known.note(PEERS[0], "failed", NOW)
    for peer_id in PEERS[1:]:
        known.note(peer_id, "passed", NOW)
    assert list(known.track_records) == [PEERS[0], *PEERS[3:]]
