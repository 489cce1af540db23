"""Messages that a simulation hands over: how many bytes each has on the wire, and how it is told another process. Pure.

A simulation counts and times the bytes of a message, and hands its receiver the message itself. Those of the record
DHT, and those by which trainers ask where others are, are not encoded at all. Records are, as they are signed, but the
nodes that read them decode none. Texts in these messages are ASCII, as their checks demand.

For another process of the same simulation a message is packed into what `marshal` writes (`Packer`): those of the
record DHT as tuples in which nodes are numbers, and all others as the bytes that they have on the wire. Both processes
know the same nodes by the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from swarm_protocol.checks import Checked
from swarm_protocol.dht_messages import (
    Contact,
    FindRequest,
    FindResponse,
    Found,
    StoreRequest,
    StoreResponse,
    contact_of,
)
from swarm_protocol.member_messages import Standing, StandingRequest
from swarm_protocol.records import ServeRecord, TrainerRecord
from swarm_protocol.wire import WireMessage, encoded, handed, message_in

_VERSION_BYTES = 1
_SHORT = 128
"""A length below this takes one byte, such as that of a peer id. One below its square, such as that of an address or a
contact, takes two."""


def find_request_bytes(message: FindRequest) -> int:
    size = _VERSION_BYTES + _items_bytes(message.keys) + _items_bytes(message.addrs)
    return size + 2 * message.only_peers + (1 + _varint_bytes(message.max_records) if message.max_records else 0)


def find_response_bytes(message: FindResponse) -> int:
    found = sum([_field_bytes(_found_bytes(each)) for each in message.found])
    return _VERSION_BYTES + found + _items_bytes(message.addrs) + 2 * message.is_cut


def store_request_bytes(message: StoreRequest) -> int:
    return _VERSION_BYTES + _field_bytes(len(message.record))


def store_response_bytes(message: StoreResponse) -> int:
    return _VERSION_BYTES + 2 * message.held


def standing_request_bytes(message: StandingRequest) -> int:
    flags = 2 * (message.hurry + message.watches)
    return _VERSION_BYTES + _text_bytes(message.run) + _number_bytes(message.step, message.attempt) + flags


def standing_bytes(message: Standing) -> int:
    contents = _text_bytes(message.state_digest, message.certificate, message.endorsement)
    return _VERSION_BYTES + contents + _items_bytes(message.known) + _number_bytes(message.outer_step, message.attempt)


SIZES: Mapping[type[WireMessage], Callable[[Any], int | bytes]] = MappingProxyType(
    {
        FindRequest: find_request_bytes,
        FindResponse: find_response_bytes,
        StoreRequest: store_request_bytes,
        StoreResponse: store_response_bytes,
        StandingRequest: standing_request_bytes,
        Standing: standing_bytes,
        ServeRecord: encoded,
        TrainerRecord: encoded,
    }
)

UNCHECKED: tuple[type[Checked], ...] = (FindRequest, FindResponse, Found, StoreRequest, StoreResponse)
"""Classes whose fields a simulation does not check: a hundred thousand of these messages are made a minute, and all by
the code of this project."""


def _found_bytes(found: Found) -> int:
    total = _items_bytes(found.records)
    for peer in found.peers:  # ten in each answer: written out, as calls would take longer than what they do
        size = 2 + len(peer.peer_id)
        for addr in peer.addrs:
            num_bytes = len(addr)
            size += num_bytes + (2 if num_bytes < _SHORT else 3)
        total += size + (2 if size < _SHORT else 3)
    return total


def _text_bytes(*texts: str | bytes) -> int:
    """Return the bytes of fields of bytes or ASCII texts, which are left out where they are empty."""
    return sum([_field_bytes(len(text)) for text in texts if text])


def _number_bytes(*numbers: int) -> int:
    """Return the bytes of fields of whole numbers, which are left out where they are zero."""
    return sum([1 + _varint_bytes(number) for number in numbers if number])


def _items_bytes(items: Iterable[str | bytes]) -> int:
    """Return the bytes of a repeated field of bytes or ASCII texts."""
    return sum([_field_bytes(len(item)) for item in items])


def _field_bytes(num_bytes: int) -> int:
    """Return the bytes of a field with a length: a tag of one byte, the length, `num_bytes`."""
    return num_bytes + 2 if num_bytes < _SHORT else 1 + _varint_bytes(num_bytes) + num_bytes


def _varint_bytes(number: int) -> int:
    return max(1, -(-number.bit_length() // 7))


Packed: TypeAlias = Any
"""Bytes, or a tuple that begins with one of the numbers below."""

_FIND, _FOUND, _STORE, _STORED = range(4)


class Packer:
    """Packs and unpacks messages of the nodes that it was told of. A node's number is positive."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._addrs: dict[int, tuple[str, ...]] = {}
        self._contacts: dict[int, Contact] = {}
        """By number, and those without addresses by the negative one."""

    def add(self, number: int, peer_id: str, addr: str) -> None:
        """Note a node: its only address is `addr`."""
        self._numbers[peer_id] = number
        self._addrs[number] = (addr,)
        self._contacts[number] = contact_of(peer_id=peer_id, addrs=(addr,))
        self._contacts[-number] = contact_of(peer_id=peer_id)

    def number_of(self, peer_id: str) -> int:
        return self._numbers[peer_id]

    def pack(self, data: bytes) -> Packed:
        """Pack a message of one of the nodes, as its `to_bytes` has returned it."""
        match message_in(data):
            case None:
                return data
            case FindRequest() as asked:
                return _FIND, len(data), asked.keys, asked.only_peers, asked.max_records, bool(asked.addrs)
            case FindResponse() as answer:
                found = tuple([(each.records, self._packed_contacts(each.peers)) for each in answer.found])
                return _FOUND, len(data), found, bool(answer.addrs), answer.is_cut
            case StoreRequest() as stored:
                return _STORE, len(data), stored.record
            case StoreResponse() as taken:
                return _STORED, len(data), taken.held
            case message:
                return encoded(message)

    def unpack(self, packed: Packed, sender: int) -> bytes:
        """Return what `pack` was given by the node `sender`, to be handed to its receiver."""
        if isinstance(packed, bytes):
            return packed
        return handed(self._message(packed, sender), packed[1])

    def _message(self, packed: Packed, sender: int) -> WireMessage:
        match packed:
            case kind, _, keys, only_peers, max_records, has_addrs if kind == _FIND:
                addrs = self._addrs[sender] if has_addrs else ()
                return FindRequest(keys=keys, only_peers=only_peers, addrs=addrs, max_records=max_records)
            case kind, _, found, has_addrs, is_cut if kind == _FOUND:
                contacts = self._contacts
                return FindResponse(
                    found=tuple(
                        [
                            Found(records=records, peers=tuple([contacts[number] for number in numbers]))
                            for records, numbers in found
                        ]
                    ),
                    addrs=self._addrs[sender] if has_addrs else (),
                    is_cut=is_cut,
                )
            case kind, _, record if kind == _STORE:
                return StoreRequest(record=record)
            case kind, _, held if kind == _STORED:
                return StoreResponse(held=held)
        raise AssertionError(f"no message was packed like this: {packed}")

    def _packed_contacts(self, contacts: tuple[Contact, ...]) -> tuple[int, ...]:
        numbers = self._numbers
        return tuple([numbers[each.peer_id] if each.addrs else -numbers[each.peer_id] for each in contacts])
