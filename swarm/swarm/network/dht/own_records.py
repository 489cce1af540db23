"""Publishes this node's own records in the DHT, and tells peers when its addresses have changed.

A record of this node that is newer than its start, and that it did not sign, shows that another node has its key. It
has to be newer by MAX_CLOCK_SKEW_S, since this machine's clock may have been set back before the start.

Peers learn addresses from requests and answers of the DHT, and two peers may exchange none for minutes. So
`tell_address_changes` tells new addresses at once to the peers in use, and to the nodes near this node's DHT id, which
others ask for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import NoReturn

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, seal_record
from swarm_protocol.errors import PeerTimeout
from swarm_protocol.identity import Identity

from swarm.network.dht.record_dht import RecordDht
from swarm.newest_items import NewestItems

MIN_ISSUE_STEP_S = 0.002
"""Minimum difference between the issue times of two records of one key, so that the order of records is clear."""

MAX_KEYS = 256
"""Maximum keys whose latest issue time is remembered: many more than a node publishes under."""

LOOK_S = 1.0
"""Time between two looks at the addresses, and so the minimum time between two announcements."""

MAX_TOLD = 256


class OwnRecords:
    """Signs and stores this node's records, and notices records that another node with its key has signed."""

    def __init__(
        self, dht: RecordDht, identity: Identity, network_id: str, now: Callable[[], float], on_copy: Callable[[], None]
    ) -> None:
        """`on_copy` is called when a lookup finds a record that another node with the same key has signed."""
        self._dht = dht
        self._identity = identity
        self._network_id = network_id
        self._now = now
        self._on_copy = on_copy
        # records of this node's last run may be this new if the clock was set back between the two
        self._known_until = now() + limits.MAX_CLOCK_SKEW_S
        self._issued_at = NewestItems[str, float](MAX_KEYS)  # by key, the latest record's time, also after it expired
        self._published: dict[str, Envelope] = {}  # by key

    async def publish(self, key: str, payload: bytes, *, lifetime_s: float) -> bool:
        """Publish as `Network.publish` does."""
        self._forget_invalid()
        previous = self._published.get(key)
        issued_at = max(self._now(), previous.issued_at + MIN_ISSUE_STEP_S if previous else 0.0)
        envelope = seal_record(
            self._identity,
            network_id=self._network_id,
            key=key,
            payload=payload,
            issued_at=issued_at,
            lifetime_s=lifetime_s,
        )
        self._issued_at[key] = max(issued_at, self._issued_at.get(key, 0.0))
        self._published[key] = envelope
        return await self._dht.store(envelope)

    async def publish_again(self) -> None:
        """Store all records again, since other nodes may be nearest to their keys now."""
        self._forget_invalid()
        self._dht.forget_holders()
        await asyncio.gather(*(self._dht.store(envelope) for envelope in self._published.values()))

    async def lookup(self, keys: Sequence[str], *, timeout_s: float, max_records: int = 0) -> list[Envelope]:
        """Look up as `Network.lookup` does."""
        found, answered = await self._dht.find(keys, timeout_s=timeout_s, max_records=max_records)
        if not answered:
            raise PeerTimeout(f"no peer answered a lookup within {timeout_s:g} s")
        now = self._now()
        # other nodes may return a record for a while after it has expired
        records = {(envelope.subject, envelope.peer_id): envelope for envelope in found if envelope.expires_at > now}
        for envelope in records.values():
            latest = max(self._known_until, self._issued_at.get(envelope.subject, 0.0))
            if envelope.peer_id == self._identity.peer_id and envelope.issued_at > latest:
                self._on_copy()
        self._forget_invalid()
        for key in keys:
            if key in self._published:
                records[key, self._identity.peer_id] = self._published[key]
        return list(records.values())

    def _forget_invalid(self) -> None:
        """Forget records that have expired, and records from the future, as after the clock was set back: later records
        would have to be issued after them, and other nodes would refuse all of these."""
        now = self._now()
        self._published = {key: envelope for key, envelope in self._published.items() if envelope.holds_at(now)}


async def tell_address_changes(dht: RecordDht, used: Callable[[], Collection[str]]) -> NoReturn:
    """Tell peers when this node's own addresses have changed. A task of the network.

    `used` returns the peers that would look for this node if their connection was lost.
    """
    told = set(dht.known.own_addrs)
    while True:
        await asyncio.sleep(LOOK_S)
        if (now := set(dht.known.own_addrs)) != told:
            told = now
            await asyncio.gather(*map(dht.ping, islice(used(), MAX_TOLD)), dht.refresh())
