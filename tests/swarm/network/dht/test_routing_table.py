"""The contacts that a DHT node keeps as peers come and go."""

from __future__ import annotations

import hashlib
import itertools
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.network.dht import routing_table
from swarm.network.dht.routing_table import (
    BUCKET_SIZE,
    MAX_CROWDED_S,
    MAX_SUSPECT_S,
    MAX_SUSPECTS,
    MIN_CROWDED_S,
    SUSPECT_S,
    RoutingTable,
    Suspects,
    node_id_of,
)
from swarm_protocol.identity import peer_id_of

OWN = peer_id_of(bytes(32))


@cache
def peer(number: int) -> str:
    return peer_id_of(hashlib.sha256(b"%d" % number).digest())


def bucket_of(peer_id: str) -> int:
    return (node_id_of(peer_id) ^ node_id_of(OWN)).bit_length()


@cache
def far_peers(count: int) -> tuple[str, ...]:
    """Half of all peers share the bucket that is farthest from any node."""
    numbers = iter(range(10 * count + 100))
    return tuple(found for found in map(peer, numbers) if bucket_of(found) == 256)[:count]


def full_table() -> RoutingTable:
    table = RoutingTable(OWN)
    for peer_id in far_peers(BUCKET_SIZE):
        table.heard_of(peer_id)
    return table


EVENTS = st.lists(st.tuples(st.sampled_from(["heard", "lost"]), st.integers(0, 120)), max_size=300)


@given(EVENTS, st.integers(0, 2**256 - 1), st.integers(0, 40))
def test_table_after_any_events_is_bounded_and_finds_the_nearest(
    events: list[tuple[str, int]], key: int, count: int
) -> None:
    table = RoutingTable(OWN)
    there: set[str] = set()
    for event, number in events:
        if event == "heard":
            table.heard_of(peer(number))
            there.add(peer(number))
        else:
            table.lost(peer(number))
            there.discard(peer(number))
    members = table.peers
    assert len(set(members)) == len(members)
    assert set(members) <= there
    for bucket in set(map(bucket_of, there)):
        mine = [peer_id for peer_id in members if bucket_of(peer_id) == bucket]
        # as many as fit, or all known peers
        assert len(mine) == min(BUCKET_SIZE, sum(bucket_of(peer_id) == bucket for peer_id in there))
    assert table.nearest(key, count) == sorted(members, key=lambda peer_id: node_id_of(peer_id) ^ key)[:count]


def test_table_does_not_hold_the_node_itself() -> None:
    table = RoutingTable(OWN)
    table.heard_of(OWN)
    table.lost(OWN)
    assert table.peers == ()


def test_flood_of_newcomers_displaces_nobody() -> None:
    table = full_table()
    for peer_id in far_peers(200)[BUCKET_SIZE:]:
        table.heard_of(peer_id)
    assert set(table.peers) == set(far_peers(BUCKET_SIZE))
    (bucket,) = table._buckets.values()
    assert len(bucket.waiting) == BUCKET_SIZE


def test_doubtful_gives_the_longest_silent_contact_of_every_second_bucket() -> None:
    table = full_table()
    first, second, third, *_ = far_peers(BUCKET_SIZE)
    assert table.doubtful(0) == (first,)
    assert table.doubtful(1) == ()  # a bucket is due in every second turn
    table.heard_of(first)
    assert table.doubtful(0) == (second,)
    table.lost(second)
    nearer = next(each for each in map(peer, range(100)) if bucket_of(each) == 254)
    table.heard_of(nearer)
    assert table.doubtful(0) == (third, nearer)
    table.lost(nearer)
    assert table.doubtful(0) == (third,)


def test_lost_peer_is_replaced_by_the_candidate_with_the_latest_news() -> None:
    table = full_table()
    early, late = far_peers(BUCKET_SIZE + 2)[BUCKET_SIZE:]
    table.heard_of(early)
    table.heard_of(late)
    table.heard_of(early)
    gone = far_peers(BUCKET_SIZE)[3]
    table.lost(gone)
    assert gone not in table.peers
    assert early in table.peers
    assert late not in table.peers
    table.lost(late)  # it is no longer a candidate
    table.lost(far_peers(BUCKET_SIZE)[4])
    assert late not in table.peers


def test_lost_peer_returns_with_its_next_call() -> None:
    table = RoutingTable(OWN)
    table.heard_of(peer(1))
    table.lost(peer(1))
    assert table.peers == ()
    table.heard_of(peer(1))
    assert table.peers == (peer(1),)


def test_place_of_a_peer_follows_from_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_id_of(OWN) == int.from_bytes(hashlib.sha256(OWN.encode()).digest(), "big")
    assert routing_table.to_id(b"\x01\x00") == 256


def test_doubtful_leaves_out_contacts_with_recent_news() -> None:
    table = RoutingTable(OWN)
    first, second, *_ = far_peers(2)
    table.heard_of(first, 10.0)
    table.heard_of(second, 20.0)
    assert table.doubtful(0, heard_before_s=10.0) == ()
    assert table.doubtful(0, heard_before_s=10.1) == (first,)


def test_candidate_that_takes_a_place_is_checked_first() -> None:
    table = RoutingTable(OWN)
    *members, newcomer = far_peers(BUCKET_SIZE + 1)
    for now_s, peer_id in enumerate((*members, newcomer)):
        table.heard_of(peer_id, float(now_s))
    table.lost(members[3])
    assert table.doubtful(0, heard_before_s=0.0) == (newcomer,)


def test_member_is_pinged_when_candidates_wait_and_more_rarely_while_all_members_answer() -> None:
    table, peers = RoutingTable(OWN), far_peers(BUCKET_SIZE + 1)
    for member in peers[:BUCKET_SIZE]:
        table.heard_of(member, 0.0)
    assert not table.crowded(100.0)  # no candidate waits
    table.heard_of(peers[BUCKET_SIZE], 100.0)
    times = []
    for now_s in range(100, 1500):
        for member in table.crowded(now_s):
            times.append(now_s)
            table.heard_of(member, now_s)
    assert times[0] == 100
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses == [min(MAX_CROWDED_S, MIN_CROWDED_S * 2**number) for number in range(len(pauses))]
    assert len(pauses) > 5


def test_dead_members_are_pinged_one_after_the_other_while_candidates_wait() -> None:
    table, peers = RoutingTable(OWN), far_peers(2 * BUCKET_SIZE)
    gone, newcomers = peers[:BUCKET_SIZE], peers[BUCKET_SIZE:]
    for peer_id in peers:
        table.heard_of(peer_id, 0.0)
    while pinged := table.crowded(100.0):
        for peer_id in pinged:
            if peer_id in gone:
                table.lost(peer_id)
            else:
                table.heard_of(peer_id, 100.0)
    assert set(table.peers) == set(newcomers)


def test_suspect_is_left_out_for_twice_as_long_each_time_until_it_answers() -> None:
    suspects, now_s, held_s = Suspects(), 100.0, list[float]()
    for _ in range(8):
        suspects.add(peer(1), now_s)
        begin_s = now_s
        while peer(1) in suspects.at(now_s):
            now_s += 1.0
        held_s.append(now_s - begin_s)
    assert held_s == [min(MAX_SUSPECT_S, SUSPECT_S * 2**number) for number in range(8)]
    suspects.clear(peer(1))
    suspects.add(peer(1), now_s)
    assert peer(1) not in suspects.at(now_s + SUSPECT_S)


def test_suspect_is_tried_again_soon_when_it_calls_and_dropped_when_nobody_names_it() -> None:
    suspects = Suspects()
    for now_s in (0.0, 10.0, 25.0):
        suspects.add(peer(1), now_s)
    suspects.has_called(peer(1), 26.0)
    assert peer(1) in suspects.at(26.0)
    assert peer(1) not in suspects.at(26.0 + SUSPECT_S)
    suspects.at(26.0 + 2 * SUSPECT_S)
    assert not suspects._left_out


def test_suspects_are_bounded() -> None:
    suspects = Suspects()
    for number in range(MAX_SUSPECTS + 1):
        suspects.add(f"peer {number}", 0.0)
    assert len(suspects.at(0.0)) == MAX_SUSPECTS
