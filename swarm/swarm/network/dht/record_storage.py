"""Holds the records that one node stores for all nodes, by key and signer, within bounds. Pure, except for its clock.

`RecordValidator` checks each record before it is stored. For each key and signer, the record issued last is held until
`drop_at`.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable

from swarm_protocol import limits
from swarm_protocol.dht_messages import dht_id_of
from swarm_protocol.envelope import RECORD_PURPOSE, Envelope, unseal
from swarm_protocol.errors import SwarmError

MAX_KEYS = 16384
"""Maximum keys: those of some thousand models and runs, each with child keys."""

MAX_BYTES = 256 * 2**20
"""Maximum encoded bytes of all stored records. A thousand nodes with eight models each need about 5 MiB."""

MAX_KEYS_PER_SIGNER = 64
"""Maximum keys of one signer, three times those of a node that serves and trains eight models. So an attacker needs
hundreds of identities to fill the storage."""

_SHARE_DROPPED = 64
"""A 64th of the keys is dropped at once if there is no room, so that a flood of keys does not cost a search for
each."""

_MAX_CHECKED_BYTES = 16 * 2**20
"""Maximum bytes of the records that are remembered as checked, counting _ENVELOPE_BYTES more for each: ten thousand
usual records."""
_ENVELOPE_BYTES = 1024


class RecordStorage:
    """Holds records by key and signer: the newest record of each signer under a key."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._records: dict[bytes, dict[str, tuple[float, bytes]]] = {}  # issue time and encoded record
        self._signed_ids: dict[str, set[bytes]] = {}  # the DHT ids under which each signer has a record
        self._first_due: dict[bytes, float] = {}  # by DHT id, a time before which none of its records is due
        self._num_bytes = 0

    @property
    def num_records(self) -> int:
        """The number of records, including those that are due and not yet dropped."""
        return sum(map(len, self._records.values()))

    def store(self, envelope: Envelope, data: bytes) -> bool:
        """Hold `data`, the encoded `envelope`. Return False if the held record of its signer is newer, if its key is
        full, or if its signer already has records under MAX_KEYS_PER_SIGNER keys here."""
        dht_id = dht_id_of(envelope.subject)
        self._drop_due([dht_id])
        held = self._records.get(dht_id, {})
        present = held.get(envelope.peer_id)
        # a held record from the future, as after this machine's clock was set back, is replaced
        if present is not None and envelope.issued_at <= present[0] <= _latest(self._now()):
            return present[1] == data
        if present is None and (len(held) >= limits.MAX_RECORDS_PER_KEY or self._has_its_share(envelope.peer_id)):
            return False
        self._records.setdefault(dht_id, held)[envelope.peer_id] = (envelope.issued_at, data)
        self._signed_ids.setdefault(envelope.peer_id, set()).add(dht_id)
        self._first_due[dht_id] = min(self._first_due.get(dht_id, math.inf), drop_at(envelope.issued_at))
        self._num_bytes += len(data) - (len(present[1]) if present else 0)
        self._make_room()
        return envelope.peer_id in self._records.get(dht_id, {})

    def get(self, dht_id: bytes) -> tuple[bytes, ...]:
        """Return the encoded records under this DHT id."""
        self._drop_due([dht_id])
        held = self._records.get(dht_id)
        return tuple([data for _, data in held.values()]) if held else ()

    def clear_due(self) -> None:
        """Drop all records that are due."""
        self._drop_due(list(self._records))

    def _has_its_share(self, signer: str) -> bool:
        if len(self._signed_ids.get(signer, ())) >= MAX_KEYS_PER_SIGNER:
            self._drop_due(list(self._signed_ids[signer]))
        return len(self._signed_ids.get(signer, ())) >= MAX_KEYS_PER_SIGNER

    def _drop_due(self, dht_ids: Iterable[bytes]) -> None:
        now = self._now()
        for dht_id in dht_ids:
            if self._first_due.get(dht_id, math.inf) > now:
                continue
            for signer, (issued_at, _) in list(self._records.get(dht_id, {}).items()):
                if drop_at(issued_at) <= now:
                    self._drop(dht_id, signer)
            if dht_id in self._records:
                self._first_due[dht_id] = min(drop_at(issued_at) for issued_at, _ in self._records[dht_id].values())

    def _make_room(self) -> None:
        """Drop the keys whose last record is due first, with all their records."""
        if len(self._records) <= MAX_KEYS and self._num_bytes <= MAX_BYTES:
            return
        self.clear_due()
        while len(self._records) > MAX_KEYS or self._num_bytes > MAX_BYTES:
            num_dropped = max(1, len(self._records) // _SHARE_DROPPED)
            for dht_id in heapq.nsmallest(num_dropped, self._records, key=self._due_at):
                for signer in list(self._records[dht_id]):
                    self._drop(dht_id, signer)

    def _due_at(self, dht_id: bytes) -> float:
        return max(drop_at(issued_at) for issued_at, _ in self._records[dht_id].values())

    def _drop(self, dht_id: bytes, signer: str) -> None:
        _, data = self._records[dht_id].pop(signer)
        self._num_bytes -= len(data)
        if not self._records[dht_id]:
            del self._records[dht_id]
            del self._first_due[dht_id]
        self._signed_ids[signer].discard(dht_id)
        if not self._signed_ids[signer]:
            del self._signed_ids[signer]


def drop_at(issued_at: float) -> float:
    """Return the time at which a record issued at `issued_at` is deleted, which may be after it expires.

    Until then an expired record hides earlier ones of its signer: the later *issued* one wins, even if it lives for a
    shorter time. The time follows from a signed value, so no peer can make an old record outlast a new one.
    """
    return issued_at + limits.MAX_RECORD_LIFETIME_S


def _latest(now: float) -> float:
    """Return the latest issue time that is accepted at `now`."""
    return now + limits.MAX_CLOCK_SKEW_S


class RecordValidator:
    """Checks encoded records of one network, and remembers checked ones."""

    def __init__(self, network_id: str, now: Callable[[], float]) -> None:
        self._network_id = network_id
        self.now = now
        self._checked: OrderedDict[bytes, Envelope] = OrderedDict()  # in the order of their last use
        self._num_checked_bytes = 0

    def envelope(self, data: bytes) -> Envelope | None:
        """Return the checked envelope, or None if it is invalid. An expired record is valid here; lookups leave it
        out."""
        envelope, now = self._checked.get(data) or self._unseal(data), self.now()
        if envelope is None or drop_at(envelope.issued_at) <= now or envelope.issued_at > _latest(now):
            return None
        self._remember(data, envelope, now)
        return envelope

    def _remember(self, data: bytes, envelope: Envelope, now: float) -> None:
        if data in self._checked:
            self._checked.move_to_end(data)
            return
        self._checked[data] = envelope
        self._num_checked_bytes += len(data) + _ENVELOPE_BYTES
        oldest = next(iter(self._checked.values()))
        while self._num_checked_bytes > _MAX_CHECKED_BYTES or drop_at(oldest.issued_at) <= now:
            forgotten, _ = self._checked.popitem(last=False)
            self._num_checked_bytes -= len(forgotten) + _ENVELOPE_BYTES
            oldest = next(iter(self._checked.values()))

    def _unseal(self, data: bytes) -> Envelope | None:
        try:
            return unseal(
                data,
                purpose=RECORD_PURPOSE,
                network_id=self._network_id,
                now=self.now(),
                max_payload_bytes=limits.MAX_RECORD_BYTES,
                max_lifetime_s=limits.MAX_RECORD_LIFETIME_S,
                expired_too=True,
            )
        except SwarmError:
            return None
