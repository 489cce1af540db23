"""What this node has heard of peers in its local network. No stranger there can have the others forgotten.

A sender of packets can name any number of peers, and may name one that exists with addresses of its own choice. So
each source address has few places, what it says stands beside what others say, and when all places are taken, those go
first that have the most. A claim by which a peer was reached keeps its place while it is repeated. Pure: the time is
an argument.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from swarm_protocol.dht_messages import Contact

from swarm.network.ip_kinds import IpAddress

MAX_CLAIMS = 64
"""One peer is enough to get in."""

MAX_PER_SOURCE = 8
"""A machine may run several nodes."""

_Key = tuple[IpAddress, str]


@dataclass(slots=True)
class _Claim:
    contact: Contact
    heard_at: float
    was_reached: bool = False


class NearbyPeers:
    def __init__(self) -> None:
        self._claims: OrderedDict[_Key, _Claim] = OrderedDict()  # by source and peer; the one heard last is last

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def contacts(self) -> tuple[Contact, ...]:
        """The peers and where they are said to be: one of each source, then a second one of each, and so on."""
        num_before: Counter[IpAddress] = Counter()
        ranked = []
        for (source, _), claim in self._claims.items():
            ranked.append((num_before[source], claim.contact))
            num_before[source] += 1
        return tuple(dict.fromkeys(contact for _, contact in sorted(ranked, key=lambda each: each[0])))

    def note(self, source: IpAddress, contact: Contact, now: float) -> None:
        """Take in what was said from an address. If all places are taken by claims that were right, it is dropped."""
        key = (source, contact.peer_id)
        if (known := self._claims.get(key)) is not None:
            known.was_reached &= known.contact == contact  # at other addresses it has proved nothing yet
            known.contact, known.heard_at = contact, now
            self._claims.move_to_end(key)
        elif self._make_room(source):
            self._claims[key] = _Claim(contact, now)

    def reached(self, contact: Contact) -> None:
        """The peer has proved that it is there."""
        for claim in self._claims.values():
            claim.was_reached |= claim.contact == contact

    def forget(self, until: float) -> None:
        """Drop the claims that were not heard after `until`."""
        for key in [key for key, claim in self._claims.items() if claim.heard_at <= until]:
            del self._claims[key]

    def _make_room(self, source: IpAddress) -> bool:
        """Return whether there is a place for a claim of `source`, for which another one may have been dropped."""
        nums = Counter(each for each, _ in self._claims)
        if nums[source] < MAX_PER_SOURCE and len(self._claims) < MAX_CLAIMS:
            return True
        droppable = [
            key
            for key, claim in self._claims.items()
            if not claim.was_reached and (nums[source] < MAX_PER_SOURCE or key[0] == source)
        ]
        if not droppable:
            return False
        del self._claims[max(droppable, key=lambda key: nums[key[0]])]  # of equal ones the oldest
        return True
