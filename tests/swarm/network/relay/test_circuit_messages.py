from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.network.relay.circuit_messages import (
    CircuitStatus,
    check_hop_accepted,
    check_stop_accepted,
    hop_status,
    parse_hop_request,
    reserve_request,
    stop_request,
)

PEER = b"\x12\x03abc"


def body(message: bytes) -> bytes:
    assert message[0] == len(message) - 1
    return message[1:]


def test_requests_have_the_bytes_of_the_specification() -> None:
    assert reserve_request() == b"\x02\x08\x00"
    assert hop_status(CircuitStatus.OK) == b"\x04\x08\x02\x28\x64"
    assert stop_request(PEER) == b"\x0b\x08\x00\x12\x07\x0a\x05" + PEER


def test_request_is_a_reservation_or_names_a_peer() -> None:
    assert parse_hop_request(body(reserve_request())) is None
    # as the daemon writes it: type CONNECT, and a peer with its id and no addresses
    assert parse_hop_request(b"\x08\x01\x12\x07\x0a\x05" + PEER) == PEER


@pytest.mark.parametrize(
    "request_body",
    [
        b"",
        b"\x08\x02",
        b"\x08\x01",
        b"\x08\x01\x12\x00",
        b"\x08\x01\x12\x02\x0a\x00",
        b"\x08\x01\x12\x43\x0a\x41" + b"x" * 65,
    ],
    ids=["empty", "a status", "no peer", "no peer id", "an empty peer id", "a long peer id"],
)
def test_malformed_request_raises_value_error(request_body: bytes) -> None:
    with pytest.raises(ValueError, match="neither"):
        parse_hop_request(request_body)


def test_only_the_status_ok_is_accepted() -> None:
    check_hop_accepted(body(hop_status(CircuitStatus.OK)))
    check_stop_accepted(b"\x08\x01\x20\x64")
    with pytest.raises(ValueError, match="200"):
        check_hop_accepted(body(hop_status(CircuitStatus.RESERVATION_REFUSED)))
    with pytest.raises(ValueError, match="the answer is malformed"):
        check_stop_accepted(body(hop_status(CircuitStatus.OK)))


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_raise_value_error(noise: bytes) -> None:
    for read in (parse_hop_request, check_hop_accepted, check_stop_accepted):
        with contextlib.suppress(ValueError):
            read(noise)
