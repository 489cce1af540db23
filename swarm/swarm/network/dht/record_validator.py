"""Decides which records this node believes: signed by their peer, for this network, small, short-lived.

Used by the DHT at both ends: when another peer asks us to store, and when one answers us. Pure but for a cache of
signatures that were checked. What is kept of them, and for how long, is `record_storage`'s.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, unseal
from swarm_protocol.errors import SwarmError
from swarm_protocol.signed_record import RECORD_PURPOSE

_MAX_CHECKED = 8192


def drop_at(issued_at: float) -> float:
    """When a record that was issued then is forgotten; not when it expires, which may be earlier.

    Until then a record that expired hides those that its signer issued before it: the later *issued* one wins, also
    when it lives for a shorter time. A function of a signed time, so nobody makes an old record outlast a new one.
    """
    return issued_at + limits.MAX_RECORD_LIFETIME_S


class RecordValidator:
    def __init__(self, network_id: str, now: Callable[[], float] = time.time) -> None:
        self._network_id = network_id
        self.now = now
        self._checked: OrderedDict[bytes, Envelope] = OrderedDict()

    def envelope(self, data: bytes) -> Envelope | None:
        """None: refused. A record that has expired since it was issued passes: whoever looks it up leaves it out."""
        envelope = self._checked.get(data) or self._unseal(data)
        if envelope is None or drop_at(envelope.issued_at) <= self.now():
            return None
        self._checked[data] = envelope
        self._checked.move_to_end(data)
        while len(self._checked) > _MAX_CHECKED:
            self._checked.popitem(last=False)
        return envelope

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
