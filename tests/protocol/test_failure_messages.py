from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol.decoders import IDENTITY, NEIGHBOUR
from swarm_protocol import limits, wire
from swarm_protocol.errors import (
    ConfigError,
    IntegrityError,
    PeerError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    PeerViolation,
    RoundError,
    SessionError,
    StartError,
    SwarmError,
)
from swarm_protocol.failure_messages import decode_failure, encode_failure
from swarm_protocol.identity import peer_id_of
from swarm_protocol.proto import failure_pb2

SENDER = IDENTITY.peer_id
PLAIN = [ConfigError, StartError, PeerError, PeerUnreachable, PeerTimeout, PeerViolation, IntegrityError, SwarmError]


def sent(error: BaseException) -> SwarmError:
    return decode_failure(encode_failure(error), SENDER)


def subclasses(error_type: type[SwarmError]) -> set[type[SwarmError]]:
    return {error_type}.union(*(subclasses(child) for child in error_type.__subclasses__()))


@pytest.mark.parametrize("error_type", PLAIN)
def test_failure_keeps_class_message_remedy_and_peer(error_type: type[SwarmError]) -> None:
    error = sent(error_type("no such block", remedy="ask for 0 to 3", peer_id=NEIGHBOUR))
    assert type(error) is error_type
    assert (error.message, error.remedy, error.peer_id) == ("no such block", "ask for 0 to 3", NEIGHBOUR)


def test_failure_keeps_the_fields_of_each_class() -> None:
    refused = sent(PeerRefused("full", retry_after_s=2.5))
    assert isinstance(refused, PeerRefused)
    assert (refused.retry_after_s, refused.lacks_room) == (2.5, False)
    full = sent(PeerRefused("full", lacks_room=True))
    assert isinstance(full, PeerRefused)
    assert (full.retry_after_s, full.lacks_room) == (0.0, True)
    failed = sent(RoundError("no quorum", missing=(NEIGHBOUR, SENDER)))
    assert isinstance(failed, RoundError)
    assert failed.missing == (NEIGHBOUR, SENDER)
    lost = sent(SessionError("evicted", session_id="s-1"))
    assert isinstance(lost, SessionError)
    assert lost.session_id == "s-1"


def test_failure_covers_the_whole_tree() -> None:
    for error_type in subclasses(SwarmError):
        if error_type.__module__ == "swarm_protocol.errors":
            assert type(sent(error_type("what happened"))) is error_type


def test_failure_without_a_peer_is_attributed_to_the_sender() -> None:
    assert sent(PeerTimeout("late")).peer_id == SENDER


@pytest.mark.parametrize(
    "error", [KeyError("/home/ada/secret"), asyncio.CancelledError("secret"), KeyboardInterrupt(), OSError(2, "secret")]
)
def test_failure_of_an_unexpected_error_gives_no_details(error: BaseException) -> None:
    data = encode_failure(error)
    assert b"secret" not in data
    assert type(error).__name__.encode() not in data
    decoded = decode_failure(data, SENDER)
    assert type(decoded) is PeerError
    assert "internally" in decoded.message
    assert decoded.remedy


@given(
    message=st.text(max_size=3000),
    remedy=st.text(max_size=3000),
    peer_id=st.text(max_size=60),
    retry_after_s=st.floats(),
    missing=st.lists(st.text(max_size=4) | st.just(NEIGHBOUR), max_size=8).map(tuple),
)
def test_failure_of_any_contents_is_encoded_as_one_printable_line(
    message: str, remedy: str, peer_id: str, retry_after_s: float, missing: tuple[str, ...]
) -> None:
    for error in (
        PeerRefused(message, remedy=remedy, peer_id=peer_id, retry_after_s=retry_after_s),
        RoundError(message, remedy=remedy, peer_id=peer_id, missing=missing),
        SessionError(message, remedy=remedy, peer_id=peer_id, session_id=message),
    ):
        decoded = sent(error)
        assert type(decoded) is type(error)
        assert str(decoded).isprintable()


def test_failure_at_every_bound_fits() -> None:
    peer_ids = tuple(peer_id_of(number.to_bytes(32, "big")) for number in range(2 * limits.MAX_FAILURE_PEERS))
    wide = "\U0001f600" * 2 * limits.MAX_FAILURE_TEXT_CHARS
    decoded = sent(RoundError(wide, remedy=wide, peer_id=NEIGHBOUR, missing=peer_ids))
    assert isinstance(decoded, RoundError)
    assert decoded.missing == peer_ids[: limits.MAX_FAILURE_PEERS]
    assert len(decoded.message) == limits.MAX_FAILURE_TEXT_CHARS
    sent(SessionError(wide, remedy=wide, peer_id=NEIGHBOUR, session_id=wide))


@pytest.mark.parametrize(
    ("asked", "kept"), [(math.nan, 0.0), (math.inf, 0.0), (-1.0, 0.0), (1e9, limits.MAX_RETRY_AFTER_S)]
)
def test_failure_with_an_absurd_retry_time_is_brought_into_range(asked: float, kept: float) -> None:
    decoded = sent(PeerRefused("no", retry_after_s=asked))
    assert isinstance(decoded, PeerRefused)
    assert decoded.retry_after_s == kept


def test_failure_with_a_code_of_a_newer_version_is_a_peer_error() -> None:
    decoded = decode_failure(wire.encode(failure_pb2.Failure(code="quota", message="too much")), SENDER)
    assert type(decoded) is PeerError
    assert decoded.message == "too much"


def test_refusal_for_a_reason_of_a_newer_version_is_a_plain_refusal() -> None:
    newer: Any = 7
    decoded = decode_failure(wire.encode(failure_pb2.Failure(code="refused", message="no", reason=newer)), SENDER)
    assert isinstance(decoded, PeerRefused)
    assert not decoded.lacks_room


@pytest.mark.parametrize(
    "failure",
    [
        failure_pb2.Failure(),
        failure_pb2.Failure(code="peer", message="a\x1b[2J"),
        failure_pb2.Failure(code="peer", message="a" * 1001),
        failure_pb2.Failure(code="peer", peer_id="somebody"),
        failure_pb2.Failure(code="refused", retry_after_s=math.nan),
        failure_pb2.Failure(code="refused", retry_after_s=-1.0),
        failure_pb2.Failure(code="round", missing=["somebody"]),
        failure_pb2.Failure(code="round", missing=[NEIGHBOUR, NEIGHBOUR]),
        failure_pb2.Failure(code="session", session_id="s" * 1000),
    ],
)
def test_malformed_failure_is_a_violation_by_the_sender(failure: failure_pb2.Failure) -> None:
    with pytest.raises(PeerViolation) as caught:
        decode_failure(wire.encode(failure), SENDER)
    assert caught.value.peer_id == SENDER
