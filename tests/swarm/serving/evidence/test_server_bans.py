"""Bans of servers: how long they last, and that unlisted servers displace no listed ones."""

from __future__ import annotations

import pytest
from swarm.serving.evidence import server_bans as module
from swarm.serving.evidence.server_bans import MAX_UNLISTED, RENEWAL_S, ServerBan, ServerBans
from swarm.serving.manifest.possession import ServerVerdict
from swarm.trust.reputation import BAR_S
from swarm_protocol import limits


def ban(peer_id: str, at: float = 0.0, size: int = 10) -> ServerBan:
    verdict = ServerVerdict(peer_id=peer_id, model="tiny", at=at, reason="lied")
    return ServerBan(verdict=verdict, data=bytes(size))


def test_ban_lasts_as_long_after_the_lie_as_one_from_a_client_s_own_check() -> None:
    bans = ServerBans()
    bans.add(ban("a", at=1000.0), ())
    assert bans.peers(1000.0 + BAR_S - 1) == {"a"}
    assert (bans.peers(1000.0 + BAR_S), bans.at(1000.0 + BAR_S)) == (frozenset(), ())
    assert (bans.lapse(1000.0 + BAR_S), bans.is_news("a", 1000.0)) == ({"a"}, True)


def test_ban_is_extended_by_a_later_lie_and_unchanged_by_one_of_the_same_day() -> None:
    bans = ServerBans()
    bans.add(ban("a", at=0.0), ())
    assert not bans.is_news("a", RENEWAL_S - 1)
    assert bans.is_news("a", RENEWAL_S)
    assert bans.add(ban("a", at=RENEWAL_S), ()) == frozenset()
    assert [each.verdict.until for each in bans.at(0.0)] == [RENEWAL_S + BAR_S]


def test_bans_of_unlisted_servers_are_few_and_displace_no_listed_ones() -> None:
    bans = ServerBans()
    for number in range(MAX_UNLISTED):
        assert bans.add(ban(f"stranger {number}"), ()) == frozenset()
    assert bans.add(ban("another"), ()) is None
    assert bans.add(ban("stranger 0", at=RENEWAL_S), ()) == frozenset(), "it displaces only its own ban"
    assert bans.add(ban("another"), {"another"}) == frozenset()
    listed = {f"listed {number}" for number in range(limits.MAX_SERVER_BANS)}
    for peer_id in sorted(listed):
        bans.add(ban(peer_id, at=-5.0), listed)
    assert bans.peers(0.0) == listed, "unlisted servers give way, although their lies are later"


def test_bans_are_bounded_in_bytes_and_drop_the_earliest_lie_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EVIDENCE_BYTES", 30)
    bans = ServerBans()
    listed = {"a", "b", "c", "d"}
    for peer_id, at in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        assert bans.add(ban(peer_id, at), listed) == frozenset()
    assert bans.add(ban("d", 4.0), listed) == {"b"}
    assert {each.verdict.peer_id for each in bans.unknown_to({"a"}, 0.0)} == {"c", "d"}


def test_ban_is_not_added_when_it_would_be_dropped_at_once() -> None:
    bans = ServerBans()
    peers = [f"server {number:03}" for number in range(limits.MAX_SERVER_BANS + 1)]
    for peer_id in peers[1:]:
        bans.add(ban(peer_id, at=5.0), peers)
    assert bans.add(ban("stranger", at=9.0), peers) is None, "all others are listed"
    assert bans.add(ban(peers[0], at=4.0), peers) is None, "its lie is the earliest"
    assert bans.add(ban(peers[0], at=5.0), peers) is None, "the lies are equally old"
    assert bans.peers(0.0) == set(peers[1:])
    assert bans.add(ban(peers[0], at=6.0), peers) == {peers[1]}
