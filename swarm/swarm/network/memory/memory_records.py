"""The part of the simulated record store that one node holds, under the checks of the real validator.

Which nodes a record is handed to, and whom a lookup asks, is left to `memory`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from swarm_protocol.envelope import Envelope
from swarm_protocol.errors import SwarmError
from swarm_protocol.signed_record import unseal_record

MIN_ISSUE_STEP_S = 0.002
"""Between two records of one key and signer, as on the real network."""

logger = logging.getLogger(__name__)


class RecordStore:
    def __init__(self, network_id: str, now: Callable[[], float]) -> None:
        self._network_id = network_id
        self._now = now
        self._records: dict[str, dict[str, Envelope]] = {}

    def take(self, key: str, record: bytes) -> bool:
        """Keep `record` unless it is invalid or older than the one of its signer."""
        try:
            envelope = unseal_record(record, network_id=self._network_id, key=key, now=self._now())
        except SwarmError as error:
            logger.warning("refused a record: %s", error)
            return False
        live = {known.peer_id: known for known in self.live(key)}
        known = live.get(envelope.peer_id)
        if known is not None and known.issued_at > envelope.issued_at:
            return False
        self._records[key] = {**live, envelope.peer_id: envelope}
        return True

    def live(self, key: str) -> list[Envelope]:
        now = self._now()
        return [envelope for envelope in self._records.get(key, {}).values() if envelope.expires_at > now]

    def issue_time(self, key: str, peer_id: str) -> float:
        """Now, or if need be a little after the record that this one will replace."""
        earlier = self._records.get(key, {}).get(peer_id)
        return max(self._now(), earlier.issued_at + MIN_ISSUE_STEP_S if earlier else 0.0)

    def clear(self) -> None:
        self._records.clear()


def newest(stores: Sequence[RecordStore], keys: Iterable[str]) -> list[Envelope]:
    """Of each key and signer the latest live record that any of the stores holds."""
    found: dict[tuple[str, str], Envelope] = {}
    for key in keys:
        for store in stores:
            for envelope in store.live(key):
                known = found.get((key, envelope.peer_id))
                if known is None or known.issued_at < envelope.issued_at:
                    found[key, envelope.peer_id] = envelope
    return list(found.values())
