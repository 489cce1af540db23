from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol.decoders import IDENTITY, NOW, VOTE_ENVELOPE
from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, seal, unseal
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.identity import Identity, verify

NAMES = st.from_regex(r"[a-z][a-z0-9._-]{0,30}", fullmatch=True)
SUBJECTS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=60)


def vote(
    *,
    identity: Identity = IDENTITY,
    purpose: str = "vote",
    network_id: str = "test",
    subject: str = "run/1/0",
    payload: bytes = b"yes",
    issued_at: float = NOW,
    expires_at: float = NOW + 30.0,
) -> Envelope:
    return seal(
        identity,
        purpose=purpose,
        network_id=network_id,
        subject=subject,
        payload=payload,
        issued_at=issued_at,
        expires_at=expires_at,
    )


def open_vote(data: bytes, now: float = NOW) -> Envelope:
    return unseal(data, purpose="vote", network_id="test", now=now)


def signed_anew(body: bytes) -> bytes:
    """Sign `body`, an envelope without its signature, correctly, so that only the format can be refused."""
    return body + IDENTITY.sign(b"swarm-envelope:" + body)


@given(
    purpose=NAMES,
    network_id=NAMES,
    subject=SUBJECTS,
    payload=st.binary(max_size=200),
    issued_at=st.floats(1e-3, 1e10),
    lifetime_s=st.floats(1.0, limits.MAX_SIGNED_LIFETIME_S / 2),
)
def test_envelope_sealed_and_unsealed_is_the_same(
    purpose: str, network_id: str, subject: str, payload: bytes, issued_at: float, lifetime_s: float
) -> None:
    sealed = vote(
        purpose=purpose,
        network_id=network_id,
        subject=subject,
        payload=payload,
        issued_at=issued_at,
        expires_at=issued_at + lifetime_s,
    )
    opened = unseal(sealed.to_bytes(), purpose=purpose, network_id=network_id, now=issued_at)
    assert opened == sealed
    assert opened.to_bytes() == sealed.to_bytes()


def test_envelope_bytes_are_the_documented_layout() -> None:
    body = (
        b"\x01\x00\x00\x00\x04vote\x00\x00\x00\x04test\x00\x00\x00\x07run/1/0"
        + IDENTITY.public_key
        + struct.pack(">dd", NOW, NOW + 30.0)
        + b"\x00\x00\x00\x03yes"
    )
    assert vote().to_bytes() == signed_anew(body)


def test_envelope_with_any_bit_changed_is_refused() -> None:
    original = VOTE_ENVELOPE.to_bytes()
    for position in range(len(original)):
        for bit in range(8):
            data = bytearray(original)
            data[position] ^= 1 << bit
            with pytest.raises((PeerViolation, IntegrityError)):
                open_vote(bytes(data))


def test_envelope_with_bytes_missing_or_added_is_refused_even_when_signed() -> None:
    body = vote().to_bytes()[:-64]
    for end in range(len(body)):
        with pytest.raises(PeerViolation):
            open_vote(signed_anew(body[:end]))
    for tail in (b"\x00", b"x" * 64):
        with pytest.raises(PeerViolation, match="too many"):
            open_vote(signed_anew(body) + tail)
        with pytest.raises(PeerViolation, match="too many"):
            open_vote(signed_anew(body + tail))


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("purpose", b"\x00\x00\x00\x04vo\xffe"),
        ("purpose", b"\x00\x00\x00\x00"),
        ("subject", b"\x00\x00\x00\x03a\nb"),
        ("subject", "\0\0\0\x05a\u202eb".encode()),
        ("subject", b"\x00\x00\x00\x03\xed\xa0\x80"),
        ("subject", b"\xff\xff\xff\xffrun"),
        ("subject", b"\x00\x00\x01\x00" + b"a" * 256),
        ("times", struct.pack(">dd", math.nan, NOW)),
        ("times", struct.pack(">dd", NOW, math.nan)),
        ("times", struct.pack(">dd", -0.0, NOW)),
        ("times", struct.pack(">dd", 0.0, NOW)),
        ("times", struct.pack(">dd", NOW, math.inf)),
        ("times", struct.pack(">dd", NOW, NOW)),
        ("times", struct.pack(">dd", NOW, 1e300)),
    ],
)
def test_envelope_with_a_bad_field_is_a_violation_even_when_signed(field: str, data: bytes) -> None:
    parts = {
        "purpose": b"\x00\x00\x00\x04vote",
        "network": b"\x00\x00\x00\x04test",
        "subject": b"\x00\x00\x00\x01s",
        "key": IDENTITY.public_key,
        "times": struct.pack(">dd", NOW, NOW + 30.0),
        "payload": b"\x00\x00\x00\x00",
    }
    assert open_vote(signed_anew(b"\x01" + b"".join(parts.values()))).subject == "s"
    with pytest.raises(PeerViolation, match="malformed"):
        open_vote(signed_anew(b"\x01" + b"".join((parts | {field: data}).values())))


def test_unseal_for_another_purpose_or_network_is_refused_by_name() -> None:
    data = vote().to_bytes()
    with pytest.raises(PeerViolation, match="signed as 'vote', not as 'group'") as caught:
        unseal(data, purpose="group", network_id="test", now=NOW)
    assert caught.value.peer_id == IDENTITY.peer_id
    with pytest.raises(PeerViolation, match="network 'test', not 'main'"):
        unseal(data, purpose="vote", network_id="main", now=NOW)


def test_unseal_outside_its_time_is_refused() -> None:
    data = vote().to_bytes()
    open_vote(data, now=NOW + 29.9)
    with pytest.raises(PeerViolation, match="expired 0 s ago"):
        open_vote(data, now=NOW + 30.0)
    open_vote(data, now=NOW - limits.MAX_CLOCK_SKEW_S)
    with pytest.raises(PeerViolation, match="clocks is wrong"):
        open_vote(data, now=NOW - 3600.0)


def test_unseal_of_too_long_a_life_or_payload_is_refused() -> None:
    data = vote(payload=bytes(101)).to_bytes()
    with pytest.raises(PeerViolation, match="101 bytes, more than 100"):
        unseal(data, purpose="vote", network_id="test", now=NOW, max_payload_bytes=100)
    with pytest.raises(PeerViolation, match="lives for 30 s, more than 20"):
        unseal(data, purpose="vote", network_id="test", now=NOW, max_lifetime_s=20.0)
    with pytest.raises(PeerViolation, match="more than its purpose allows"):
        unseal(data + bytes(1000), purpose="vote", network_id="test", now=NOW, max_payload_bytes=100)


def test_unseal_of_anothers_signature_is_an_integrity_error() -> None:
    forged = replace(vote(), signature=vote(identity=Identity(bytes(32))).signature)
    with pytest.raises(IntegrityError) as caught:
        open_vote(forged.to_bytes())
    assert caught.value.peer_id == IDENTITY.peer_id


def test_signature_of_an_envelope_is_invalid_without_its_prefix() -> None:
    sealed = vote()
    with pytest.raises(IntegrityError):
        verify(sealed.peer_id, sealed.to_bytes()[:-64], sealed.signature)


@pytest.mark.parametrize(
    "change",
    [
        {"purpose": ""},
        {"purpose": "a" * (limits.MAX_PURPOSE_BYTES + 1)},
        {"network_id": "a b"},
        {"subject": ""},
        {"subject": "é" * limits.MAX_SUBJECT_BYTES},
        {"subject": "\ud800"},
        {"payload": bytes(limits.MAX_SIGNED_PAYLOAD_BYTES + 1)},
        {"payload": "text"},
        {"expires_at": NOW},
        {"issued_at": math.nan},
    ],
)
def test_seal_out_of_bounds_is_a_value_error(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"purpose|network id|subject|payload|times"):
        vote(**change)


def test_envelope_at_every_bound_fits_the_overhead() -> None:
    largest = vote(
        purpose="p" * limits.MAX_PURPOSE_BYTES,
        network_id="n" * limits.MAX_NETWORK_ID_BYTES,
        subject="s" * limits.MAX_SUBJECT_BYTES,
        payload=bytes(limits.MAX_SIGNED_PAYLOAD_BYTES),
    )
    overhead = len(largest.to_bytes()) - limits.MAX_SIGNED_PAYLOAD_BYTES
    assert overhead <= limits.MAX_ENVELOPE_OVERHEAD_BYTES
    unseal(largest.to_bytes(), purpose=largest.purpose, network_id=largest.network_id, now=NOW)
