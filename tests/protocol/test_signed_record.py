from __future__ import annotations

from dataclasses import replace

import pytest
from protocol.decoders import IDENTITY, KEY, NEIGHBOUR, NODE, NOW, RECORD_ENVELOPE, SERVE, TRAINER, VOTE_ENVELOPE
from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, read_record, seal, seal_record, unseal_record
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.records import Record, child_keys, lookup_key, publish_key


def record_of(record: Record, key: str, payload: bytes | None = None) -> Envelope:
    return seal_record(
        IDENTITY,
        network_id="test",
        key=key,
        payload=record.to_bytes() if payload is None else payload,
        issued_at=NOW,
        lifetime_s=60.0,
    )


def unseal_at(data: bytes, *, key: str = KEY, now: float = NOW) -> Envelope:
    return unseal_record(data, network_id="test", key=key, now=now)


@pytest.mark.parametrize("record", [NODE, SERVE, TRAINER], ids=lambda record: type(record).__name__)
def test_record_sealed_unsealed_and_read_is_the_same(record: Record) -> None:
    key = publish_key(record, IDENTITY.peer_id)
    envelope = unseal_at(record_of(record, key).to_bytes(), key=key)
    assert read_record(envelope) == record
    assert (envelope.peer_id, envelope.issued_at, envelope.expires_at) == (IDENTITY.peer_id, NOW, NOW + 60.0)


def test_unseal_record_of_another_key_or_expired_is_refused() -> None:
    data = RECORD_ENVELOPE.to_bytes()
    with pytest.raises(PeerViolation, match="not 'train/other/0'"):
        unseal_at(data, key="train/other/0")
    with pytest.raises(PeerViolation, match="expired 3540 s ago"):
        unseal_at(data, now=NOW + 3600.0)


def test_unseal_record_of_an_envelope_for_another_purpose_is_refused() -> None:
    with pytest.raises(PeerViolation, match="signed as 'vote', not as 'record'"):
        unseal_at(VOTE_ENVELOPE.to_bytes(), key=VOTE_ENVELOPE.subject)


def test_unseal_record_with_anothers_name_is_an_integrity_error() -> None:
    stolen = replace(RECORD_ENVELOPE, peer_id=NEIGHBOUR)
    with pytest.raises(IntegrityError):
        unseal_at(stolen.to_bytes())


@pytest.mark.parametrize(
    ("payload", "lifetime_s"),
    [
        (bytes(limits.MAX_RECORD_BYTES + 1), 60.0),
        (b"", limits.MAX_RECORD_LIFETIME_S + 1.0),
        (b"", 0.0),
        (b"", float("nan")),
    ],
)
def test_seal_record_over_the_limits_is_a_value_error(payload: bytes, lifetime_s: float) -> None:
    with pytest.raises(ValueError, match=r"record (has|lives)"):
        seal_record(IDENTITY, network_id="test", key=KEY, payload=payload, issued_at=NOW, lifetime_s=lifetime_s)


def signed_record(payload: bytes, expires_at: float) -> bytes:
    """Return a record that a dishonest peer can sign, past `seal_record`."""
    envelope = seal(
        IDENTITY,
        purpose="record",
        network_id="test",
        subject=KEY,
        payload=payload,
        issued_at=NOW,
        expires_at=expires_at,
    )
    return envelope.to_bytes()


def test_unseal_record_over_the_limits_is_refused() -> None:
    unseal_at(signed_record(bytes(limits.MAX_RECORD_BYTES), NOW + limits.MAX_RECORD_LIFETIME_S))
    with pytest.raises(PeerViolation, match="lives for 301 s, more than 300"):
        unseal_at(signed_record(b"", NOW + limits.MAX_RECORD_LIFETIME_S + 1.0))
    with pytest.raises(PeerViolation, match="payload has 8193 bytes, more than 8192"):
        unseal_at(signed_record(bytes(limits.MAX_RECORD_BYTES + 1), NOW + 60.0))
    with pytest.raises(PeerViolation, match="more than its purpose allows"):
        unseal_at(signed_record(bytes(2 * limits.MAX_RECORD_BYTES), NOW + 60.0))


def test_read_record_under_the_key_of_another_peer_or_under_another_model_is_refused() -> None:
    own = publish_key(SERVE, IDENTITY.peer_id, 1)
    assert read_record(record_of(SERVE, own)) == SERVE
    elsewhere = [key for key in child_keys(lookup_key("serve", SERVE.model)) if key != own]
    foreign = publish_key(replace(SERVE, model="another"), IDENTITY.peer_id)
    for key in (*elsewhere, foreign):
        with pytest.raises(PeerViolation, match="does not belong under") as caught:
            read_record(record_of(SERVE, key))
        assert caught.value.peer_id == IDENTITY.peer_id


def test_read_record_of_malformed_bytes_or_an_unknown_kind_is_a_violation_by_the_signer() -> None:
    for envelope in (record_of(TRAINER, KEY, payload=b"\x01\xff"), record_of(NODE, "files/0")):
        with pytest.raises(PeerViolation) as caught:
            read_record(envelope)
        assert caught.value.peer_id == IDENTITY.peer_id


def test_records_of_two_signers_under_one_key_are_distinguished() -> None:
    other = Identity(bytes(32))
    theirs = seal_record(other, network_id="test", key=KEY, payload=TRAINER.to_bytes(), issued_at=NOW, lifetime_s=60.0)
    assert unseal_at(theirs.to_bytes()).peer_id == other.peer_id
