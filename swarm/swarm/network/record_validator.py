"""Decides which records this node keeps and believes: signed by the peer that their subkey names, small, short-lived.

Used by hivemind's DHT at both ends: when another peer asks us to store, and when one answers us. `validate` is pure but
for a cache of signatures that were checked. `RecordStorage` is what the DHT keeps records in, with the bounds it lacks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgpack
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, unseal
from swarm_protocol.errors import SwarmError
from swarm_protocol.signed_record import RECORD_PURPOSE

MAX_ENVELOPE_BYTES = limits.MAX_RECORD_BYTES + limits.MAX_ENVELOPE_OVERHEAD_BYTES
_MSGPACK_HEADER_BYTES = 8
_MAX_CHECKED = 8192
_TIME_TOLERANCE_S = 1e-3

MAX_STORED_KEYS = 16384
"""Sharded keys of a thousand models and runs; the keys that expire first make room."""

MAX_RECORDS_PER_KEY = 400
"""One answer carries all records of a key and must fit the unary lane's 4 MiB even if each is as large as allowed."""


def dht_expiration(issued_at: float) -> float:
    """When the DHT drops a record that was issued then; not when it expires, which only the envelope says.

    The DHT keeps of two records the one with the later expiration, whereas here the later *issued* one must win, also
    when it lives for a shorter time. A function of a signed time, so nobody can make an old record outlast a new one.
    """
    return issued_at + limits.MAX_RECORD_LIFETIME_S


def pack(value: str | bytes) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """`num_refused` counts records that others wanted to store here."""

    def __init__(self, network_id: str, now: Callable[[], float] = time.time) -> None:
        self._network_id = network_id
        self._now = now
        self.num_refused = 0
        self._checked: OrderedDict[tuple[bytes, bytes], Envelope] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        is_valid = self.envelope(record) is not None
        self.num_refused += not is_valid
        return is_valid

    def envelope(self, record: DHTRecord) -> Envelope | None:
        """None: refused. A record that has expired since it was issued passes: whoever looks it up leaves it out."""
        if (
            record.subkey in DHTProtocol.RESERVED_SUBKEYS
            or len(record.value) > MAX_ENVELOPE_BYTES + _MSGPACK_HEADER_BYTES
        ):
            return None
        known = self._checked.get((record.key, record.value))
        envelope = known or self._unseal(record)
        if envelope is None:
            return None
        self._checked[record.key, record.value] = envelope
        self._checked.move_to_end((record.key, record.value))
        while len(self._checked) > _MAX_CHECKED:
            self._checked.popitem(last=False)
        if pack(envelope.peer_id) != record.subkey:
            return None
        drop_at = dht_expiration(envelope.issued_at)
        return envelope if abs(record.expiration_time - drop_at) <= _TIME_TOLERANCE_S else None

    def _unseal(self, record: DHTRecord) -> Envelope | None:
        issued_at = record.expiration_time - limits.MAX_RECORD_LIFETIME_S
        try:
            sealed = msgpack.unpackb(record.value, raw=False)
            if not isinstance(sealed, bytes):
                return None
            envelope = unseal(
                sealed,
                purpose=RECORD_PURPOSE,
                network_id=self._network_id,
                now=min(self._now(), issued_at),
                max_payload_bytes=limits.MAX_RECORD_BYTES,
                max_lifetime_s=limits.MAX_RECORD_LIFETIME_S,
            )
        except (ValueError, SwarmError, msgpack.UnpackException):
            return None
        return envelope if DHTID.generate(source=envelope.subject).to_bytes() == record.key else None


class RecordStorage(DHTLocalStorage):  # type: ignore[misc]
    """Dictionaries of signed records by key. Only what the validator passed gets here."""

    def __init__(self) -> None:
        super().__init__(maxsize=MAX_STORED_KEYS)

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        """False if what we have is newer: hivemind would then forget the newer one when the older one expires."""
        held = self.get(key)
        records = held.value if held is not None and isinstance(held.value, DictionaryDHTValue) else None
        if records is not None:
            present = records.get(subkey)
            if present is not None and present.expiration_time >= expiration_time:
                return False
            if present is None and len(records) >= MAX_RECORDS_PER_KEY:
                return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))
