"""A search asks the right nodes for the right keys, and ends in time."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.network.dht import routing_table
from swarm.network.dht.routing_table import MAX_CALLS, WIDTH, NodeLookup, node_id_of, to_id
from swarm_protocol import limits
from swarm_protocol.dht_messages import Contact, dht_id_of
from swarm_protocol.envelope import Envelope, seal_record
from swarm_protocol.identity import Identity, peer_id_of

PEERS = [peer_id_of(hashlib.sha256(b"%d" % number).digest()) for number in range(300)]
OWN, *OTHERS = PEERS
KEY = dht_id_of("k")


def sealed(signer: int, key: str, issued_at: float) -> Envelope:
    identity = Identity(bytes([signer]) * 32)
    return seal_record(identity, network_id="test", key=key, payload=b"", issued_at=issued_at, lifetime_s=60)


def nearest(peers: list[str], count: int) -> list[str]:
    return sorted(peers, key=lambda peer_id: node_id_of(peer_id) ^ to_id(KEY))[:count]


@given(st.sets(st.sampled_from(OTHERS[:60])), st.data())
def test_search_asks_the_nearest_live_nodes_when_others_are_dead(known: set[str], data: st.DataObject) -> None:
    dead = data.draw(st.sets(st.sampled_from(OTHERS[:60])))
    search = NodeLookup([KEY], OWN)
    search.meet([*known, OWN], ())
    asked = []
    while calls := search.next_calls():
        for peer_id, keys in calls:
            assert keys == [KEY]
            asked.append(peer_id)
            if peer_id in dead:
                search.drop(peer_id)
            else:
                search.answered.add(peer_id)
                search.meet(nearest(OTHERS[:60], WIDTH), ())
    assert len(set(asked)) == len(asked)
    assert OWN not in asked
    named = known | set(nearest(OTHERS[:60], WIDTH)) if known - dead else known
    assert set(nearest(list(named - dead), WIDTH)) <= set(asked)
    assert set(search.nearest(KEY, WIDTH)) == set(nearest(list(named - dead), WIDTH))


def test_search_does_not_ask_suspected_or_dropped_nodes() -> None:
    search = NodeLookup([KEY], OWN)
    search.meet(OTHERS[:3], OTHERS[:1])
    search.drop(OTHERS[1])
    search.meet(OTHERS[:3], OTHERS[:1])
    assert search.peers == {OTHERS[2]}


def test_search_asks_a_suspected_node_that_is_named_again_and_keeps_each_address() -> None:
    search = NodeLookup([KEY], OWN)
    first, other = (Contact(peer_id=OTHERS[0], addrs=(f"/ip4/192.0.2.{n}/tcp/4001",)) for n in (1, 2))
    search.hear([first], OTHERS[:1], named_by=OTHERS[1])
    assert search.peers == set()
    search.hear([first], (), named_by=OTHERS[1])
    search.hear([other], (), named_by=OTHERS[2])
    assert search.peers == {OTHERS[0]}
    assert search.addrs_of(OTHERS[0]) == (*first.addrs, *other.addrs)


def test_liars_that_are_not_most_of_the_naming_nodes_hide_no_address() -> None:
    search, true = NodeLookup([KEY], OWN), Contact(peer_id=OTHERS[0], addrs=("/ip4/192.0.2.1/tcp/4001",))
    for liar in range(4):
        for number in range(3):  # it may name one address for each key, or answer again
            false = tuple(f"/ip4/198.51.100.{liar}/tcp/{number * 100 + port}" for port in range(1, 9))
            search.hear([Contact(peer_id=OTHERS[0], addrs=false)], (), named_by=OTHERS[10 + liar])
    for honest in range(2):
        search.hear([true], (), named_by=OTHERS[20 + honest])
    assert search.addrs_of(OTHERS[0])[0] == true.addrs[0]
    search.hear([true], (), named_by=OTHERS[10])
    assert len(search.addrs_of(OTHERS[0])) == 1 + 3 * limits.MAX_CONTACT_ADDRS


def test_search_ends_when_a_liar_names_peers_without_end() -> None:
    search = NodeLookup([KEY], OWN)
    search.meet(OTHERS[:WIDTH], ())
    num_calls = 0
    while calls := search.next_calls():
        num_calls += len(calls)
        # nearer ones each time
        search.meet([peer_id_of(hashlib.sha256(b"%d %d" % (num_calls, n)).digest()) for n in range(WIDTH)], ())
        for peer_id, _ in calls:
            search.drop(peer_id)
    assert num_calls == MAX_CALLS


def test_nearest_nodes_are_among_those_that_answered() -> None:
    search = NodeLookup([KEY], OWN)
    search.meet(OTHERS[:3], ())
    search.answered.update(OTHERS[:2])
    search.drop(OTHERS[0])
    assert search.nearest(KEY, 3) == [OTHERS[1]]


def test_search_keeps_of_each_subject_and_signer_the_record_issued_last() -> None:
    search = NodeLookup([KEY], OWN)
    records = [sealed(signer, key, issued_at) for signer in b"ab" for key in "kl" for issued_at in (2.0, 3.0, 1.0)]
    for record in records:
        search.take_in(record)
    assert list(search.records.values()) == records[1::3]


def test_search_keeps_at_most_its_bound_of_records_for_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_table, "MAX_RECORDS_PER_KEY", 2)
    search = NodeLookup([KEY], OWN)
    for signer in b"abc":
        search.take_in(sealed(signer, "k", 1.0))
    search.take_in(sealed(ord("a"), "k", 2.0))
    search.take_in(sealed(ord("c"), "l", 1.0))
    found = [(record.subject, record.peer_id, record.issued_at) for record in search.records.values()]
    a, b, c = (sealed(signer, "k", 1.0).peer_id for signer in b"abc")
    assert found == [("k", a, 2.0), ("k", b, 1.0), ("l", c, 1.0)]


def test_search_asks_again_for_what_an_answer_had_no_room_for() -> None:
    keys = [dht_id_of(str(number)) for number in range(3)]
    search = NodeLookup(keys, OWN)
    search.meet(OTHERS[:1], ())
    assert search.next_calls() == [(OTHERS[0], keys)]
    search.left_out(OTHERS[0], keys[1:])
    assert search.next_calls() == [(OTHERS[0], keys[1:])]
    assert search.next_calls() == []


def test_search_for_many_keys_asks_for_as_many_as_a_request_takes() -> None:
    keys = [dht_id_of(str(number)) for number in range(limits.MAX_FIND_KEYS + 1)]
    search = NodeLookup(keys, OWN)
    search.meet(OTHERS[:1], ())
    assert search.next_calls() == [(OTHERS[0], keys[:-1]), (OTHERS[0], keys[-1:])]
