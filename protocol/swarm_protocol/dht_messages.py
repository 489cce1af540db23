"""Messages of the record DHT: find the peers and records nearest to an id, store a record.

A find without keys is a ping: a node that answers is there, and each learns the other's addresses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from swarm_protocol import limits, wire
from swarm_protocol.checks import check_addr, check_count, check_digest
from swarm_protocol.identity import check_peer_id
from swarm_protocol.proto import dht_pb2

_FIELD_BYTES = 6  # what protobuf writes before one, at most

MAX_STORED_BYTES = limits.MAX_RECORD_BYTES + limits.MAX_ENVELOPE_OVERHEAD_BYTES


def place_of(name: str) -> bytes:
    """Return the DHT id of a record's subject or a peer id. It is a hash of the name, so nobody can choose it."""
    return hashlib.sha256(name.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class FindRequest:
    """A request for the records at the ids `keys` and the nodes nearest to each. `only_peers` leaves out the records.

    `addrs` are the sender's addresses. A sender without any is not named to others.
    """

    keys: tuple[bytes, ...] = ()
    only_peers: bool = False
    addrs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count(self.keys, "keys", max_items=limits.MAX_FIND_KEYS)
        for key in self.keys:
            check_digest(key, "key")
        _check_addrs(self.addrs)

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(dht_pb2.FindRequest, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> FindRequest:
        """Raises PeerViolation."""
        return wire.decode(data, dht_pb2.FindRequest, wire.flat(cls), max_bytes=limits.MAX_FIND_REQUEST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """A node and where it can be dialled, without the final /p2p/<peer_id>. Nothing vouches for the addresses."""

    peer_id: str
    addrs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_peer_id(self.peer_id)
        _check_addrs(self.addrs)

    @property
    def num_bytes(self) -> int:
        """An upper bound of the bytes on the wire."""
        return sum(len(item) + _FIELD_BYTES for item in (self.peer_id, *self.addrs, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer for one id: its signed envelopes, with only their size checked, and the nodes near it."""

    records: tuple[bytes, ...] = ()
    peers: tuple[Contact, ...] = ()

    def __post_init__(self) -> None:
        check_count(self.records, "records", max_items=limits.MAX_RECORDS_PER_KEY)
        for record in self.records:
            _check_record(record)
        check_count(tuple(peer.peer_id for peer in self.peers), "peers", max_items=limits.MAX_FOUND_PEERS)

    @property
    def num_bytes(self) -> int:
        """An upper bound of the bytes on the wire."""
        num_record_bytes = sum(len(record) + _FIELD_BYTES for record in (*self.records, b""))
        return num_record_bytes + sum(peer.num_bytes for peer in self.peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindResponse:
    """Answers for the first keys of the request, in order: as many as fit into MAX_FIND_RESPONSE_BYTES, and at least
    one.

    `addrs` are the answering node's addresses.
    """

    found: tuple[Found, ...] = ()
    addrs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.found) > limits.MAX_FIND_KEYS:
            raise ValueError(f"found has {len(self.found)} items, more than {limits.MAX_FIND_KEYS}")
        _check_addrs(self.addrs)

    @classmethod
    def fitting(cls, found: Iterable[Found], addrs: tuple[str, ...] = ()) -> FindResponse:
        """The first of `found`, as many as fit."""
        fit: list[Found] = []
        room = limits.MAX_FIND_RESPONSE_BYTES - sum(len(addr) + _FIELD_BYTES for addr in addrs)
        for each in found:
            room -= each.num_bytes
            if room < 0 and fit:
                break
            fit.append(each)
        return cls(found=tuple(fit), addrs=addrs)

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(dht_pb2.FindResponse, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> FindResponse:
        """Raises PeerViolation."""
        build = wire.flat(cls, {"found": wire.flat(Found, {"peers": wire.flat(Contact)})})
        return wire.decode(data, dht_pb2.FindResponse, build, max_bytes=limits.MAX_FIND_RESPONSE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """Hold this signed envelope, whose place follows from its subject."""

    record: bytes

    def __post_init__(self) -> None:
        _check_record(self.record)

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(dht_pb2.StoreRequest, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> StoreRequest:
        """Raises PeerViolation."""
        max_bytes = MAX_STORED_BYTES + limits.MAX_REQUEST_BYTES
        return wire.decode(data, dht_pb2.StoreRequest, wire.flat(cls), max_bytes=max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResponse:
    """Whether the record is stored now. It is not if it is invalid, older than the stored one, or beyond a bound."""

    held: bool

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(dht_pb2.StoreResponse, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> StoreResponse:
        """Raises PeerViolation."""
        return wire.decode(data, dht_pb2.StoreResponse, wire.flat(cls), max_bytes=limits.MAX_REQUEST_BYTES)


def _check_addrs(addrs: tuple[str, ...]) -> None:
    check_count(addrs, "addrs", max_items=limits.MAX_CONTACT_ADDRS)
    for addr in addrs:
        check_addr(addr, "addr")


def _check_record(record: object) -> None:
    if not (isinstance(record, bytes) and 0 < len(record) <= MAX_STORED_BYTES):
        raise ValueError(f"a record is not bytes, 1 to {MAX_STORED_BYTES} of them")
