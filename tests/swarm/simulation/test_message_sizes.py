"""Tests that the computed size of a message is that of its encoding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol.dht_examples import PEERS
from swarm.simulation.message_sizes import SIZES
from swarm_protocol import limits
from swarm_protocol.dht_messages import Contact, FindRequest, FindResponse, Found, StoreRequest, dht_id_of
from swarm_protocol.member_messages import Standing, StandingRequest
from swarm_protocol.wire import WireMessage

from protocol import dht_examples, training_examples

EXAMPLES = [
    each
    for each in (*dht_examples.EXAMPLES, *training_examples.EXAMPLES)
    if isinstance(each, WireMessage) and type(each) in SIZES
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_sizes_are_those_of_the_encoded_examples(message: WireMessage) -> None:
    assert SIZES[type(message)](message) == len(message.to_bytes())


addrs = st.lists(st.integers(1, 150).map(lambda length: f"/{'a' * length}"), max_size=3, unique=True).map(tuple)
records = st.lists(st.binary(min_size=1, max_size=300), max_size=4, unique=True).map(tuple)
found = st.builds(
    Found,
    records=records,
    peers=st.lists(st.builds(Contact, peer_id=st.sampled_from(PEERS), addrs=addrs), max_size=1).map(tuple),
)
steps, attempts = st.integers(1, limits.MAX_OUTER_STEP), st.integers(0, limits.MAX_ATTEMPT)
messages = st.one_of(
    st.builds(FindRequest, keys=st.just((dht_id_of("a"),)), addrs=addrs, max_records=st.integers(0, 128)),
    st.builds(FindResponse, found=st.lists(found, max_size=3).map(tuple), addrs=addrs),
    st.builds(StoreRequest, record=st.binary(min_size=1, max_size=20_000)),
    st.builds(StandingRequest, run=st.just("run"), step=steps, attempt=attempts, hurry=st.booleans()),
    st.builds(
        Standing,
        outer_step=steps,
        state_digest=st.just(dht_id_of("a")),
        certificate=st.integers(0, 2**17).map(bytes),
        known=st.lists(st.sampled_from(PEERS), unique=True).map(tuple),
        attempt=attempts,
        endorsement=st.binary(max_size=200),
    ),
)


@given(messages)
def test_sizes_are_those_of_encoded_random_messages(message: WireMessage) -> None:
    assert SIZES[type(message)](message) == len(message.to_bytes())
