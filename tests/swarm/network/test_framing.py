"""Frames round-trip, and those that break a bound are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.network import framing
from swarm.network.framing import Kind
from swarm_protocol.errors import PeerViolation


@pytest.mark.parametrize(
    "num_bytes", [0, 1, framing.CHUNK_BYTES, framing.CHUNK_BYTES + 1, 3 * framing.CHUNK_BYTES, 2**21 + 7]
)
def test_pieces_of_a_message_join_to_it_and_the_last_is_marked(num_bytes: int) -> None:
    message = bytes(range(256)) * (num_bytes // 256) + b"x" * (num_bytes % 256)
    pieces = list(framing.pieces(message))
    assert b"".join(piece for _, piece in pieces) == message
    assert [kind for kind, _ in pieces] == [Kind.MORE] * (len(pieces) - 1) + [Kind.DATA]
    assert all(len(piece) <= framing.CHUNK_BYTES for _, piece in pieces)
    assert all(piece for _, piece in pieces[1:])


@given(st.binary(min_size=framing.HEADER.size, max_size=framing.HEADER.size))
def test_header_of_any_bytes_is_bounded_or_refused(header: bytes) -> None:
    try:
        _, length = framing.parse_header(header)
    except PeerViolation:
        return
    assert length <= framing.WINDOW_BYTES


@pytest.mark.parametrize("kind", list(Kind))
def test_header_over_the_bound_of_its_kind_is_a_violation(kind: Kind) -> None:
    with pytest.raises(PeerViolation, match=kind.name):
        framing.parse_header(framing.HEADER.pack(kind, framing.WINDOW_BYTES + 1))


def test_header_of_unknown_kind_is_a_violation() -> None:
    with pytest.raises(PeerViolation, match="unknown kind 99"):
        framing.parse_header(framing.HEADER.pack(99, 0))


def test_credit_frame_grants_what_it_says() -> None:
    assert framing.parse_header(framing.credit(4711)) == (Kind.CREDIT, 4711)


@pytest.mark.parametrize("num_bytes", [0, 1, framing.CHUNK_BYTES - 1])
def test_header_of_a_short_piece_before_the_last_is_a_violation(num_bytes: int) -> None:
    """A short message could otherwise consist of endless pieces, which the receiver keeps until the last."""
    with pytest.raises(PeerViolation, match="before the last of its message"):
        framing.parse_header(framing.HEADER.pack(Kind.MORE, num_bytes))
