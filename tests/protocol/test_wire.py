from __future__ import annotations

from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_protocol import checks, limits, wire
from swarm_protocol.commit_messages import Certificate
from swarm_protocol.dht_messages import FindRequest, FindResponse, StoreRequest, StoreResponse
from swarm_protocol.errors import PeerViolation
from swarm_protocol.proto import dht_pb2, failure_pb2, hello_pb2, records_pb2, session_pb2, training_pb2
from swarm_protocol.training_messages import Group, Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """Mirrors TrainerRecord, which has text, bytes, numbers and an optional number."""

    run: str
    outer_step: int
    digest: bytes
    tokens_per_s: float
    loss: float | None
    state: str
    report: None = None
    num_parameters: int | None = None
    validation: None = None
    endorsed_step: int = 0
    held_out_scores: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.outer_step == 13:
            raise ValueError("outer_step is unlucky")


READ = wire.reader(Flat, records_pb2.TrainerRecord.DESCRIPTOR)
WRITE = wire.writer(Flat, records_pb2.TrainerRecord.DESCRIPTOR)


def decode_flat(data: bytes, max_bytes: int = 1000) -> Flat:
    return wire.decode(data, records_pb2.TrainerRecord, READ, max_bytes=max_bytes)


@given(
    value=st.builds(
        Flat,
        run=st.text(),
        outer_step=st.integers(14, 2**64 - 1),
        digest=st.binary(),
        tokens_per_s=st.floats(allow_nan=False),
        loss=st.none() | st.floats(allow_nan=False),
        state=st.text(),
    )
)
def test_flat_value_round_trips(value: Flat) -> None:
    message = records_pb2.TrainerRecord()
    WRITE(message, value)
    data = wire.encode(message)
    assert decode_flat(data, max_bytes=10_000) == value


def test_decode_refuses_with_the_message_and_the_reason() -> None:
    good = wire.encode(records_pb2.TrainerRecord(run="a"))
    for data, reason in (
        (b"", "TrainerRecord is empty"),
        (good + bytes(1000), "TrainerRecord has 1004 bytes, more than 1000"),
        (b"\x02" + good[1:], "TrainerRecord has message version 2, and this node reads 1"),
        (good[:-1], "TrainerRecord is truncated or malformed"),
        (good + b"\x07", "TrainerRecord is truncated or malformed"),
        (b"\x01\x0a\x01\xff", "TrainerRecord is truncated or malformed"),
        (wire.encode(records_pb2.TrainerRecord(outer_step=13)), "TrainerRecord is invalid: outer_step is unlucky"),
    ):
        with pytest.raises(PeerViolation, match=reason):
            decode_flat(data)


def test_decode_of_another_version_says_what_to_do() -> None:
    with pytest.raises(PeerViolation) as caught:
        decode_flat(b"\x09")
    assert caught.value.remedy == "update the older of the two nodes"


def test_decode_ignores_fields_that_this_version_does_not_know() -> None:
    newer = wire.encode(records_pb2.ServeRecord(model="a", revision="b", queue_depth=7))
    hello = wire.decode(newer, hello_pb2.Hello, lambda message: message.network_id, max_bytes=100)
    assert hello == "a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    peer_id: str
    addrs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    records: tuple[bytes, ...]
    peers: tuple[Inner, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optional:
    sequence_id: bytes
    previous: Ref | None
    next: Ref | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    peer_id: str
    sequence_id: bytes


@pytest.mark.parametrize(
    ("message_type", "value"),
    [
        (dht_pb2.Found, Outer(records=(), peers=())),
        (dht_pb2.Found, Outer(records=(b"r",), peers=(Inner(peer_id=""), Inner(peer_id="a", addrs=("/ip4/1.2.3.4",))))),
        (session_pb2.Frame.LinkUpdate, Optional(sequence_id=b"", previous=None, next=Ref(peer_id="", sequence_id=b""))),
    ],
)
def test_messages_in_messages_round_trip(message_type: Any, value: Any) -> None:
    sent, descriptor = message_type(), message_type.DESCRIPTOR
    wire.writer(type(value), descriptor)(sent, value)
    read = wire.reader(type(value), descriptor)
    assert wire.decode(wire.encode(sent), message_type, read, max_bytes=1000) == value


def test_decode_refuses_a_message_that_would_fill_the_memory_before_parsing_it() -> None:
    most = limits.MAX_MESSAGE_VALUES
    names = wire.encode(failure_pb2.Failure(missing=[""] * most))
    found = wire.decode(names, failure_pb2.Failure, lambda sent: len(sent.missing), max_bytes=len(names))
    assert found == most
    crowd = wire.encode(failure_pb2.Failure(missing=[""] * (most + 1)))
    with pytest.raises(PeerViolation, match="Failure is invalid: it has more than 65536 values"):
        wire.decode(crowd, failure_pb2.Failure, pytest.fail, max_bytes=len(crowd))


def test_decode_refuses_too_many_items_before_it_reads_one() -> None:
    """Otherwise a message of some kilobytes from anyone would take a third of a second."""
    sent = dht_pb2.FindResponse(found=[dht_pb2.Found()] * (limits.MAX_FIND_KEYS + 1))
    sent.found[0].peers.add(peer_id="no peer id")
    with pytest.raises(PeerViolation, match="FindResponse is invalid: found has 33 items, more than 32"):
        FindResponse.from_bytes(wire.encode(sent))
    named = dht_pb2.Found(peers=[dht_pb2.Contact()] * (limits.MAX_FOUND_PEERS + 1))
    with pytest.raises(PeerViolation, match="FindResponse is invalid: peers has 21 items, more than 20"):
        FindResponse.from_bytes(wire.encode(dht_pb2.FindResponse(found=[named])))
    group = training_pb2.Group(members=[training_pb2.Contribution()] * (limits.MAX_GROUP_MEMBERS + 1))
    with pytest.raises(PeerViolation, match="Group is invalid: members has 257 items, more than 256"):
        Group.from_bytes(wire.encode(group))
    voted = training_pb2.Certificate(votes=[training_pb2.PlacedSignature()] * (limits.MAX_GROUP_MEMBERS + 1))
    with pytest.raises(PeerViolation, match="Certificate is invalid: votes has 257 items, more than 256"):
        Certificate.from_bytes(wire.encode(voted))
    ready = training_pb2.Ready(followers=[training_pb2.Follower()] * (limits.MAX_TRAINERS + 1))
    with pytest.raises(PeerViolation, match="Ready is invalid: followers has 4097 items, more than 4096"):
        Ready.from_bytes(wire.encode(ready))


def test_decode_accepts_bulk_in_one_field() -> None:
    bulk = wire.encode(records_pb2.TrainerRecord(digest=bytes(10 * limits.MAX_MESSAGE_VALUES)))
    assert len(decode_flat(bulk, max_bytes=len(bulk)).digest) == 10 * limits.MAX_MESSAGE_VALUES


def test_messages_are_handed_over_unencoded_when_requested_and_bytes_are_still_parsed() -> None:
    held = StoreResponse(held=True)
    foreign = StoreResponse(held=False).to_bytes()
    with wire.handing_over({StoreResponse: lambda _: 3}):
        assert StoreResponse.from_bytes(held.to_bytes()) is held
        assert len(held.to_bytes()) == 3
        with pytest.raises(PeerViolation):
            StoreRequest.from_bytes(held.to_bytes())
        assert not StoreResponse.from_bytes(foreign).held
        with pytest.raises(PeerViolation):
            StoreResponse.from_bytes(b"")
    again = StoreResponse.from_bytes(held.to_bytes())
    assert again == held
    assert again is not held


def test_messages_handed_over_encoded_keep_their_content() -> None:
    request = StoreRequest(record=b"an envelope")
    on_the_wire = request.to_bytes()
    with wire.handing_over({StoreRequest: wire.encoded}):
        assert request.to_bytes() == on_the_wire
        assert StoreRequest.from_bytes(request.to_bytes()) is request


def test_checks_are_skipped_only_for_the_named_classes_in_this_context() -> None:
    with checks.unchecked([StoreRequest]), wire.handing_over({StoreResponse: lambda _: 3}):
        assert StoreRequest(record=b"").record == b""
        with pytest.raises(ValueError, match="32 bytes"):
            FindRequest(keys=(b"short",))
        # for code that runs in parallel in this process, as another thread does
        elsewhere = Context()
        assert elsewhere.run(StoreResponse(held=True).to_bytes) == wire.encoded(StoreResponse(held=True))
        with pytest.raises(ValueError, match="record is not 1 to"):
            elsewhere.run(StoreRequest, record=b"")
    with pytest.raises(ValueError, match="record is not 1 to"):
        StoreRequest(record=b"")
