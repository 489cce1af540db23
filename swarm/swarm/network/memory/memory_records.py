"""Keeps the records that one node of a simulated internet holds for all nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from swarm_protocol.envelope import Envelope, unseal_record
from swarm_protocol.errors import SwarmError

logger = logging.getLogger(__name__)

MIN_ISSUE_STEP_S = 0.002
"""Minimum difference between the issue times of two records of one key and signer, as in the real network."""


@lru_cache(maxsize=2**6)
def _unsealed(record: bytes, network_id: str, key: str, now: float) -> Envelope:
    """Check a record, once for all nodes of a simulation to which it is offered at one moment. Raises SwarmError."""
    return unseal_record(record, network_id=network_id, key=key, now=now)


class RecordStore:
    def __init__(self, network_id: str, now: Callable[[], float]) -> None:
        self._network_id = network_id
        self._now = now
        self._records: dict[str, dict[str, Envelope]] = {}

    def take(self, key: str, record: bytes, may_store: Callable[[Envelope], bool] = lambda _envelope: True) -> bool:
        """Keep `record` unless it is invalid, `may_store` returns False, or its signer's present record is newer.
        Return whether it is kept."""
        try:
            envelope = _unsealed(record, self._network_id, key, self._now())
        except SwarmError as error:
            logger.warning("refused a record: %s", error)
            return False
        if not may_store(envelope):
            return False
        live = {known.peer_id: known for known in self.live(key)}
        known = live.get(envelope.peer_id)
        if known is not None and known.issued_at > envelope.issued_at:
            return False
        self._records[key] = {**live, envelope.peer_id: envelope}
        return True

    def live(self, key: str) -> list[Envelope]:
        now = self._now()
        return [envelope for envelope in self._records.get(key, {}).values() if envelope.holds_at(now)]

    def issue_time(self, key: str, peer_id: str) -> float:
        """Return the issue time for a peer's next record: now, or a little after the record that it replaces."""
        earlier = next((envelope for envelope in self.live(key) if envelope.peer_id == peer_id), None)
        return max(self._now(), earlier.issued_at + MIN_ISSUE_STEP_S if earlier else 0.0)

    def clear(self) -> None:
        self._records.clear()


def newest(stores: Sequence[RecordStore], keys: Iterable[str]) -> list[Envelope]:
    """Return, for each key and signer, the newest valid record in any of `stores`."""
    found: dict[tuple[str, str], Envelope] = {}
    for key in keys:
        for store in stores:
            for envelope in store.live(key):
                known = found.get((key, envelope.peer_id))
                if known is None or known.issued_at < envelope.issued_at:
                    found[key, envelope.peer_id] = envelope
    return list(found.values())
