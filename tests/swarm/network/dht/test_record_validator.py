"""The records that a node accepts."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.network.dht import record_storage
from swarm.network.dht.record_storage import RecordValidator
from swarm_protocol import limits
from swarm_protocol.envelope import RECORD_PURPOSE, Envelope, seal, seal_record
from swarm_protocol.identity import Identity

IDENTITY = Identity(b"a" * 32)
OTHER = Identity(b"b" * 32)
NOW = time.time()


def sealed(
    *,
    issued_at: float = NOW,
    network_id: str = "test",
    lifetime_s: float = limits.RECORD_LIFETIME_S,
    payload: bytes = b"p",
) -> bytes:
    return seal_record(
        IDENTITY, network_id=network_id, key="k", payload=payload, issued_at=issued_at, lifetime_s=lifetime_s
    ).to_bytes()


def other_than_a_record(purpose: str = RECORD_PURPOSE, lifetime_s: float = 60.0, payload: bytes = b"") -> bytes:
    return seal(
        IDENTITY,
        purpose=purpose,
        network_id="test",
        subject="k",
        payload=payload,
        issued_at=NOW,
        expires_at=NOW + lifetime_s,
    ).to_bytes()


def believed(record: bytes, now: float = NOW) -> Envelope | None:
    return RecordValidator("test", lambda: now).envelope(record)


def test_honest_record_is_accepted() -> None:
    envelope = believed(sealed())
    assert envelope is not None
    assert (envelope.peer_id, envelope.subject, envelope.payload) == (IDENTITY.peer_id, "k", b"p")


def test_expired_record_is_accepted_so_that_it_hides_what_it_replaced() -> None:
    record = sealed(lifetime_s=1)
    assert believed(record, NOW + 2) is not None
    assert believed(record, NOW + limits.MAX_RECORD_LIFETIME_S - 1) is not None
    assert believed(record, NOW + limits.MAX_RECORD_LIFETIME_S) is None


def test_checked_record_is_dropped_when_it_expires() -> None:
    now = NOW
    validator = RecordValidator("test", lambda: now)
    assert validator.envelope(sealed()) is not None
    now += limits.MAX_RECORD_LIFETIME_S
    assert validator.envelope(sealed()) is None


def test_checked_record_is_refused_when_the_clock_is_set_back_to_before_it() -> None:
    now = NOW + 3600
    validator = RecordValidator("test", lambda: now)
    ahead = sealed(issued_at=now)
    assert validator.envelope(ahead) is not None
    now = NOW
    assert validator.envelope(ahead) is None


def forged() -> dict[str, bytes]:
    honest = sealed()
    key = IDENTITY.public_key
    return {
        "nothing": b"",
        "unsigned": b"just bytes",
        "wrong signature": honest[:-64] + bytes(64),
        "signed by another": honest.replace(key, OTHER.public_key),
        "changed": honest.replace(b"test", b"tost", 1),
        "with bytes behind it": honest + b"\0",
        "another network": sealed(network_id="elsewhere"),
        "from the future": sealed(issued_at=NOW + limits.MAX_CLOCK_SKEW_S + 5),
        "too large": other_than_a_record(payload=bytes(limits.MAX_RECORD_BYTES + 1)),
        "too long-lived": other_than_a_record(lifetime_s=limits.MAX_RECORD_LIFETIME_S + 1),
        "signed for another purpose": other_than_a_record(purpose="vote"),
    }


@pytest.mark.parametrize("forgery", sorted(forged()))
def test_forged_record_is_refused(forgery: str) -> None:
    assert believed(forged()[forgery]) is None


def test_forged_record_is_refused_after_the_honest_one_was_checked() -> None:
    validator = RecordValidator("test", lambda: NOW)
    assert validator.envelope(sealed()) is not None
    assert validator.envelope(forged()["wrong signature"]) is None
    assert validator.envelope(sealed()) is not None


@pytest.mark.parametrize("size", [1, limits.MAX_RECORD_BYTES])
def test_remembered_checked_records_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(record_storage, "_MAX_CHECKED_BYTES", most := 5 * limits.MAX_RECORD_BYTES)
    validator = RecordValidator("test", lambda: NOW)
    offered = [sealed(issued_at=NOW - age_s, payload=bytes(size)) for age_s in range(50)]
    for record in (*offered, offered[-2]):
        assert validator.envelope(record) is not None
    kept = list(validator._checked)
    assert kept == [*offered[-len(kept) : -2], offered[-1], offered[-2]]
    assert most - 2 * limits.MAX_RECORD_BYTES < sum(len(each) + record_storage._ENVELOPE_BYTES for each in kept) <= most


def test_remembered_records_are_forgotten_once_nobody_holds_them_any_more() -> None:
    """Each node renews its records twice a minute: without this, a small network fills the bound with old ones."""
    now = NOW
    validator = RecordValidator("test", lambda: now)
    for _ in range(100):
        assert validator.envelope(sealed(issued_at=now)) is not None
        now += limits.RECORD_LIFETIME_S / 2
    num_lasting = math.ceil(2 * limits.MAX_RECORD_LIFETIME_S / limits.RECORD_LIFETIME_S)
    assert len(validator._checked) == num_lasting


@given(st.binary(max_size=400))
def test_record_of_any_bytes_is_refused_without_an_error(record: bytes) -> None:
    assert believed(record) is None
