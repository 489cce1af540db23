"""The records that a node stores for others, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.network.dht import record_storage
from swarm.network.dht.record_storage import RecordStorage
from swarm_protocol import limits
from swarm_protocol.dht_messages import dht_id_of
from swarm_protocol.envelope import Envelope, seal_record
from swarm_protocol.identity import Identity

IDENTITIES = [Identity(bytes([number]) * 32) for number in range(1, 6)]
NOW = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def record(signer: int = 0, key: str = "k", issued_at: float = NOW, payload: bytes = b"") -> Envelope:
    return seal_record(
        IDENTITIES[signer], network_id="test", key=key, payload=payload, issued_at=issued_at, lifetime_s=60
    )


def stored(storage: RecordStorage, envelope: Envelope) -> bool:
    return storage.store(envelope, envelope.to_bytes())


def held(storage: RecordStorage, key: str = "k") -> set[bytes]:
    return set(storage.get(dht_id_of(key)))


def test_storage_keeps_the_record_that_was_issued_last_until_it_expires() -> None:
    clock = Clock()
    storage = RecordStorage(clock)
    old, new = record(issued_at=NOW - 250), record(issued_at=NOW)
    assert stored(storage, old)
    assert stored(storage, new)
    assert stored(storage, new)  # it is stored
    assert not stored(storage, old)
    assert not stored(storage, record(issued_at=NOW, payload=b"of the same moment"))
    clock.now = NOW + limits.MAX_RECORD_LIFETIME_S - 1
    assert held(storage) == {new.to_bytes()}
    clock.now += 1
    assert held(storage) == set()
    assert storage.num_records == 0


def test_record_from_before_the_clock_was_set_back_hides_no_later_one() -> None:
    clock = Clock()
    storage = RecordStorage(clock)
    clock.now += 3600
    assert stored(storage, record(issued_at=clock.now))
    clock.now = NOW
    for age_s in (1, 0):
        new = record(issued_at=NOW - age_s)
        assert stored(storage, new)
        assert held(storage) == {new.to_bytes()}


def test_storage_keeps_each_signers_record_under_each_key() -> None:
    storage = RecordStorage(Clock())
    records = [record(signer, key) for signer in (0, 1) for key in ("k", "l")]
    assert all(stored(storage, each) for each in records)
    assert held(storage) == {records[0].to_bytes(), records[2].to_bytes()}
    assert held(storage, "other") == set()
    assert storage.num_records == 4


def test_full_key_accepts_no_other_signer_until_a_record_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_RECORDS_PER_KEY", 2)
    clock = Clock()
    storage = RecordStorage(clock)
    assert stored(storage, record(0, issued_at=NOW - 10))
    assert stored(storage, record(1))
    assert not stored(storage, record(2))
    assert stored(storage, record(1, issued_at=NOW + 1))
    clock.now += limits.MAX_RECORD_LIFETIME_S - 5
    assert stored(storage, record(2, issued_at=clock.now))


def test_signer_has_at_most_its_share_of_keys_until_a_record_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_storage, "MAX_KEYS_PER_SIGNER", 2)
    clock = Clock()
    storage = RecordStorage(clock)
    assert stored(storage, record(0, "a", NOW - 10))
    assert stored(storage, record(0, "b"))
    assert not stored(storage, record(0, "c"))
    assert stored(storage, record(0, "b", NOW + 1))
    assert stored(storage, record(1, "c"))
    clock.now += limits.MAX_RECORD_LIFETIME_S - 5
    assert stored(storage, record(0, "c", clock.now))
    assert [len(held(storage, key)) for key in "abc"] == [0, 1, 2]


def test_storage_drops_the_key_that_expires_first_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_storage, "MAX_KEYS", 2)
    storage = RecordStorage(Clock())
    assert stored(storage, record(0, "a", NOW - 100))
    assert stored(storage, record(1, "a", NOW + 1))
    assert stored(storage, record(0, "b"))
    assert stored(storage, record(0, "c", NOW + 2))
    assert [len(held(storage, key)) for key in "abc"] == [2, 0, 1]
    assert not stored(storage, record(0, "d", NOW - 200))  # itself the first
    assert storage.num_records == 3


def test_storage_drops_what_expires_first_when_there_are_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    large = bytes(limits.MAX_RECORD_BYTES)
    monkeypatch.setattr(record_storage, "MAX_BYTES", 3 * limits.MAX_RECORD_BYTES)
    storage = RecordStorage(Clock())
    for age_s, key in enumerate("abc"):
        assert stored(storage, record(0, key, NOW - age_s, large)) == (key != "c")
    assert [len(held(storage, key)) for key in "abc"] == [1, 1, 0]
    assert stored(storage, record(0, "b", NOW + 1))  # a small record in its place leaves room
    assert stored(storage, record(0, "c", NOW + 1, large))


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.integers(-400, 15), st.integers(0, 3)), max_size=60
    )
)
def test_storage_counts_what_it_holds_and_never_returns_to_older_records_after_any_stores(
    stores: list[tuple[int, str, int, int]],
) -> None:
    clock = Clock()
    storage = RecordStorage(clock)
    newest: dict[tuple[int, str], Envelope] = {}
    for signer, key, offset_s, step_s in stores:
        clock.now += step_s * 50
        envelope = record(signer, key, clock.now + offset_s)
        stored(storage, envelope)
        if (signer, key) not in newest or newest[signer, key].issued_at < envelope.issued_at:
            newest[signer, key] = envelope
    due = clock.now - limits.MAX_RECORD_LIFETIME_S
    alive = {envelope.to_bytes() for envelope in newest.values() if envelope.issued_at > due}
    storage.clear_due()
    assert set().union(*(held(storage, key) for key in "abc")) == alive
    assert storage.num_records == len(alive)
    assert storage._num_bytes == sum(map(len, alive))
