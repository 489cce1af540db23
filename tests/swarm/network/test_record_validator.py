"""Which records a node keeps and believes."""

import dataclasses
import math
import time

import msgpack
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hypothesis import given
from hypothesis import strategies as st
from swarm.network import record_validator
from swarm.network.record_validator import RecordStorage, RecordValidator, dht_expiration, pack
from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, seal
from swarm_protocol.identity import Identity
from swarm_protocol.signed_record import RECORD_PURPOSE, seal_record

IDENTITY = Identity(b"a" * 32)
OTHER = Identity(b"b" * 32)
NOW = time.time()


def sealed(
    *, identity: Identity = IDENTITY, key: str = "k", issued_at: float = NOW, network_id: str = "test"
) -> Envelope:
    return seal_record(
        identity, network_id=network_id, key=key, payload=b"p", issued_at=issued_at, lifetime_s=limits.RECORD_LIFETIME_S
    )


def stored(envelope: Envelope) -> DHTRecord:
    """As an honest peer stores it."""
    return DHTRecord(
        key=DHTID.generate(source=envelope.subject).to_bytes(),
        subkey=pack(envelope.peer_id),
        value=pack(envelope.to_bytes()),
        expiration_time=dht_expiration(envelope.issued_at),
    )


def is_valid(record: DHTRecord) -> bool:
    return RecordValidator("test", lambda: NOW).validate(record)


def test_honest_record_is_kept() -> None:
    assert is_valid(stored(sealed()))


def test_record_that_expired_since_is_kept_so_that_it_does_not_hide_the_others_of_its_key() -> None:
    assert is_valid(stored(sealed(issued_at=NOW - 2 * limits.RECORD_LIFETIME_S)))


def forged() -> dict[str, DHTRecord]:
    honest, envelope = stored(sealed()), sealed()
    signature = bytes(64)
    return {
        "unsigned": dataclasses.replace(honest, value=pack(b"just bytes")),
        "not bytes": dataclasses.replace(honest, value=msgpack.packb(["a", "list"])),
        "not msgpack": dataclasses.replace(honest, value=b"\xc1"),
        "nested too deep": dataclasses.replace(honest, value=b"\x91" * 8000 + b"\xc0"),
        "wrong signature": dataclasses.replace(honest, value=pack(envelope.to_bytes()[:-64] + signature)),
        "another's subkey": dataclasses.replace(honest, subkey=pack(OTHER.peer_id)),
        "signed by another": dataclasses.replace(stored(sealed(identity=OTHER)), subkey=pack(IDENTITY.peer_id)),
        "another key": dataclasses.replace(honest, key=DHTID.generate(source="other").to_bytes()),
        "another network": stored(sealed(network_id="elsewhere")),
        "without a subkey": dataclasses.replace(honest, subkey=DHTProtocol.IS_REGULAR_VALUE),
        "as a whole dictionary": dataclasses.replace(honest, subkey=DHTProtocol.IS_DICTIONARY),
        "from the future": stored(sealed(issued_at=NOW + limits.MAX_CLOCK_SKEW_S + 5)),
        "kept for longer": dataclasses.replace(honest, expiration_time=honest.expiration_time + 60),
        "kept for ever": dataclasses.replace(honest, expiration_time=math.inf),
        "kept for no number": dataclasses.replace(honest, expiration_time=math.nan),
        "too large": dataclasses.replace(honest, value=pack(bytes(record_validator.MAX_ENVELOPE_BYTES + 100))),
        "too long-lived": stored(
            seal(
                IDENTITY,
                purpose=RECORD_PURPOSE,
                network_id="test",
                subject="k",
                payload=b"",
                issued_at=NOW,
                expires_at=NOW + limits.MAX_RECORD_LIFETIME_S + 1,
            )
        ),
        "signed for another purpose": stored(
            seal(
                IDENTITY,
                purpose="vote",
                network_id="test",
                subject="k",
                payload=b"",
                issued_at=NOW,
                expires_at=NOW + 60,
            )
        ),
    }


@pytest.mark.parametrize("forgery", sorted(forged()))
def test_forged_record_is_refused(forgery: str) -> None:
    assert not is_valid(forged()[forgery])


def test_forged_record_is_refused_after_the_honest_one_was_checked() -> None:
    validator = RecordValidator("test", lambda: NOW)
    honest = stored(sealed())
    assert validator.validate(honest)
    assert not validator.validate(dataclasses.replace(honest, subkey=pack(OTHER.peer_id)))
    assert not validator.validate(dataclasses.replace(honest, expiration_time=honest.expiration_time + 1))


@given(st.binary(max_size=400), st.binary(max_size=60), st.floats())
def test_record_of_any_bytes_is_refused_without_an_error(value: bytes, subkey: bytes, expiration_time: float) -> None:
    assert not is_valid(DHTRecord(key=bytes(20), subkey=subkey, value=value, expiration_time=expiration_time))


def test_storage_refuses_an_older_record_and_keeps_the_newer_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, key, now = RecordStorage(), DHTID.generate(source="k"), time.time()
    old, new = dht_expiration(now - 250), dht_expiration(now)
    assert storage.store_subkey(key, "peer", b"new", new)
    assert not storage.store_subkey(key, "peer", b"old", old)
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: old + 1)
    held = storage.get(key)
    assert held is not None
    assert held.value.get("peer").value == b"new"


def test_storage_bounds_records_per_key_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_validator, "MAX_RECORDS_PER_KEY", 2)
    monkeypatch.setattr(record_validator, "MAX_STORED_KEYS", 2)
    storage, end = RecordStorage(), dht_expiration(time.time())
    keys = [DHTID.generate(source=name) for name in "abc"]
    assert storage.store_subkey(keys[0], "p1", b"", end)
    assert storage.store_subkey(keys[0], "p2", b"", end)
    assert not storage.store_subkey(keys[0], "p3", b"", end)
    assert storage.store_subkey(keys[0], "p2", b"again", end + 1)
    for offset, key in enumerate(keys):
        storage.store_subkey(key, "p1", b"", end + 10 + offset)
    assert len(storage) == 2
    assert keys[0] not in storage  # the first to expire made room
