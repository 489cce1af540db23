"""Tests that messages to another process of a simulation arrive unchanged, with the same length."""

from __future__ import annotations

import marshal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol.dht_examples import PEERS
from swarm.simulation.message_sizes import SIZES, UNCHECKED
from swarm.simulation.packed_messages import Packer
from swarm_protocol import limits
from swarm_protocol.checks import unchecked
from swarm_protocol.dht_messages import (
    FindRequest,
    FindResponse,
    Found,
    StoreRequest,
    StoreResponse,
    contact_of,
    dht_id_of,
)
from swarm_protocol.member_messages import Standing
from swarm_protocol.wire import WireMessage, handing_over

ADDRS = {peer_id: f"/ip4/10.0.0.{number}/tcp/4001" for number, peer_id in enumerate(PEERS, 1)}
SENDER = PEERS[0]

own_addrs = st.sampled_from([(), (ADDRS[SENDER],)])
contacts = st.tuples(st.sampled_from(PEERS), st.booleans()).map(
    lambda drawn: contact_of(peer_id=drawn[0], addrs=(ADDRS[drawn[0]],) if drawn[1] else ())
)
found = st.builds(
    Found,
    records=st.lists(st.binary(min_size=1, max_size=300), max_size=3, unique=True).map(tuple),
    peers=st.lists(contacts, max_size=2, unique_by=lambda contact: contact.peer_id).map(tuple),
)
messages = st.one_of(
    st.builds(
        FindRequest,
        keys=st.sampled_from([(), (dht_id_of("a"), dht_id_of("b"))]),
        only_peers=st.booleans(),
        addrs=own_addrs,
        max_records=st.integers(0, limits.MAX_RECORDS_PER_KEY),
    ),
    st.builds(FindResponse, found=st.lists(found, max_size=3).map(tuple), addrs=own_addrs),
    st.builds(StoreRequest, record=st.binary(min_size=1, max_size=300)),
    st.builds(StoreResponse, held=st.booleans()),
    st.builds(Standing, outer_step=st.integers(1, 9), state_digest=st.just(dht_id_of("a")), certificate=st.just(b"c")),
)


@given(messages)
def test_unpacked_message_equals_the_packed_one_and_has_its_length(message: WireMessage) -> None:
    packers = Packer(), Packer()
    for packer in packers:
        for number, peer_id in enumerate(PEERS, 1):
            packer.add(number, peer_id, ADDRS[peer_id])
    with handing_over(SIZES), unchecked(UNCHECKED):
        data = message.to_bytes()
        event = marshal.loads(marshal.dumps(packers[0].pack(data)))
        unpacked = packers[1].unpack(event, packers[1].number_of(SENDER))
        assert type(message).from_bytes(unpacked) == message
        assert len(unpacked) == len(data)


def test_unpacking_a_tuple_of_an_unknown_kind_fails() -> None:
    with pytest.raises(AssertionError, match="no message was packed like this"):
        Packer().unpack((99, 1, True), 1)


def test_bytes_that_are_no_message_are_packed_unchanged() -> None:
    packer = Packer()
    assert packer.unpack(packer.pack(b"a ping"), 1) == b"a ping"
