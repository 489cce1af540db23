"""Defines the messages of the record DHT: find the peers and records nearest to an id, store a record.

A find request without keys is a ping: a node that answers is there, and both nodes learn each other's addresses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Annotated, TypeAlias

from swarm_protocol import limits, wire
from swarm_protocol.checks import Checked, Digest, check_addr, check_count, distinct, filled, up_to, whole
from swarm_protocol.identity import PeerId
from swarm_protocol.proto import dht_pb2

_FIELD_BYTES = 6  # maximum bytes that protobuf writes before a field

MAX_STORED_BYTES = limits.MAX_RECORD_BYTES + limits.MAX_ENVELOPE_OVERHEAD_BYTES


@lru_cache(maxsize=2**15)
def dht_id_of(name: str) -> bytes:
    """Return the DHT id of a record's subject or a peer id. It is a hash of the name, so nobody can choose it."""
    return hashlib.sha256(name.encode()).digest()


@lru_cache(maxsize=2**14)
def check_addrs(addrs: tuple[str, ...], field: str) -> None:
    """Check the addresses that a node sends with each request and each answer. Raises ValueError."""
    check_count(addrs, field, max_items=limits.MAX_CONTACT_ADDRS)
    for addr in addrs:
        check_addr(addr, field)


Addrs: TypeAlias = Annotated[tuple[str, ...], check_addrs]


SignedRecord: TypeAlias = Annotated[bytes, filled(MAX_STORED_BYTES)]
"""A signed envelope whose size alone is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindRequest(wire.WireMessage):
    """A request for the records at the ids `keys` and the nodes nearest to each. `only_peers` leaves out the records.
    `max_records` is the maximum number of records for each key, drawn at random; 0: all.

    `addrs` are the sender's addresses. A sender without any is not named to others.
    """

    PROTO = dht_pb2.FindRequest
    MAX_BYTES = limits.MAX_FIND_REQUEST_BYTES

    keys: Annotated[tuple[Digest, ...], distinct(limits.MAX_FIND_KEYS)] = ()
    only_peers: bool = False
    addrs: Addrs = ()
    max_records: Annotated[int, whole(limits.MAX_RECORDS_PER_KEY)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact(Checked):
    """A node and its addresses, without the final /p2p/<peer_id>. Nothing proves the addresses."""

    REMEMBERED = 2**13  # nodes name the same ten peers repeatedly; at most 40 MiB

    peer_id: PeerId
    addrs: Addrs = ()


contact_of = wire.maker(Contact)


@lru_cache(maxsize=Contact.REMEMBERED)
def _contact_bytes(contact: Contact) -> int:
    """Return an upper bound of the bytes on the wire. An answer to a short request has hundreds of contacts."""
    return sum(len(item) + _FIELD_BYTES for item in (contact.peer_id, *contact.addrs, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Checked):
    """The answer for one id: its signed envelopes, with only their size checked, and the nodes near it."""

    records: Annotated[tuple[SignedRecord, ...], distinct(limits.MAX_RECORDS_PER_KEY)] = ()
    peers: Annotated[tuple[Contact, ...], up_to(limits.MAX_FOUND_PEERS)] = ()

    def __post_init__(self) -> None:
        check_count(tuple([peer.peer_id for peer in self.peers]), "peers", max_items=limits.MAX_FOUND_PEERS)

    @property
    def num_bytes(self) -> int:
        """An upper bound of the bytes on the wire."""
        num_record_bytes = sum(len(record) + _FIELD_BYTES for record in (*self.records, b""))
        return num_record_bytes + sum(map(_contact_bytes, self.peers))

    def within(self, max_bytes: int, chance: Random) -> Found:
        """Return this answer with as many records, drawn at random, as fit into `max_bytes` beside its peers."""
        room = max_bytes - replace(self, records=()).num_bytes
        fit: list[bytes] = []
        for record in chance.sample(self.records, len(self.records)):
            room -= len(record) + _FIELD_BYTES
            if room < 0:
                break
            fit.append(record)
        return replace(self, records=tuple(fit))


@dataclass(frozen=True, slots=True, kw_only=True)
class FindResponse(wire.WireMessage):
    """Answers for the first keys of the request, in order: as many as fit into MAX_FIND_RESPONSE_BYTES, and at least
    one.

    `addrs` are the answering node's addresses. `is_cut` is set if more was left out because the answer is not sent over
    a stream.
    """

    PROTO = dht_pb2.FindResponse
    MAX_BYTES = limits.MAX_FIND_RESPONSE_BYTES

    found: Annotated[tuple[Found, ...], up_to(limits.MAX_FIND_KEYS)] = ()
    addrs: Addrs = ()
    is_cut: bool = False

    @classmethod
    def fitting(cls, found: Iterable[Found], addrs: tuple[str, ...] = ()) -> FindResponse:
        """Return a response with as many of the first items of `found` as fit."""
        fit: list[Found] = []
        room = limits.MAX_FIND_RESPONSE_BYTES - sum(len(addr) + _FIELD_BYTES for addr in addrs)
        for each in found:
            num_bytes = each.num_bytes
            if fit and num_bytes > room:
                break
            room -= num_bytes
            fit.append(each)
        return cls(found=tuple(fit), addrs=addrs)

    def within(self, max_bytes: int, chance: Random) -> FindResponse:
        """Return this response, or its first places that fit into `max_bytes`: at least the first one, with some
        records drawn at random."""
        fit: list[Found] = []
        room = max_bytes - sum(len(addr) + _FIELD_BYTES for addr in (*self.addrs, ""))
        for each in self.found:
            num_bytes = each.num_bytes
            if num_bytes > room:
                return replace(self, found=tuple(fit) or (each.within(room, chance),), is_cut=True)
            room -= num_bytes
            fit.append(each)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest(wire.WireMessage):
    """A request to store this signed envelope, whose DHT id follows from its subject."""

    PROTO = dht_pb2.StoreRequest
    MAX_BYTES = MAX_STORED_BYTES + limits.MAX_REQUEST_BYTES

    record: SignedRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResponse(wire.WireMessage):
    """The answer to a StoreRequest. `held` is set if the record is stored now.

    It is not stored if it is invalid, older than the stored one, or over a limit.
    """

    PROTO = dht_pb2.StoreResponse
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    held: bool
