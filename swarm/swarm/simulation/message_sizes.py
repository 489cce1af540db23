"""Computes the sizes of messages that a simulation hands over without encoding them. Pure.

A simulation needs the number of bytes of a message, to count it and to time it, and gives the message itself to its
receiver. Messages of the record DHT, and those by which trainers ask others for their standing, are not encoded at all.
Records are encoded, because they are signed, but the nodes that read them do not decode them. Texts in these messages
are ASCII, as their checks demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from swarm_protocol.checks import Checked
from swarm_protocol.dht_messages import FindRequest, FindResponse, Found, StoreRequest, StoreResponse
from swarm_protocol.member_messages import Standing, StandingRequest
from swarm_protocol.records import ServeRecord, TrainerRecord
from swarm_protocol.wire import WireMessage, encoded

_VERSION_BYTES = 1
_SHORT = 128
"""A length below this is encoded in one byte, as that of a peer id, and a length below its square in two, as that of an
address or a contact."""


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


SIZES: Mapping[type[WireMessage], Callable[[Any], int | bytes]] = {
    FindRequest: find_request_bytes,
    FindResponse: find_response_bytes,
    StoreRequest: store_request_bytes,
    StoreResponse: store_response_bytes,
    StandingRequest: standing_request_bytes,
    Standing: standing_bytes,
    ServeRecord: encoded,
    TrainerRecord: encoded,
}

UNCHECKED: tuple[type[Checked], ...] = (FindRequest, FindResponse, Found, StoreRequest, StoreResponse)
"""Classes whose fields a simulation does not check: its own code makes all of these messages, and a simulated minute of
ten thousand nodes has more than a hundred thousand of them."""


def _found_bytes(found: Found) -> int:
    total = _items_bytes(found.records)
    for peer in found.peers:  # ten in each answer: function calls would take longer than their work
        size = 2 + len(peer.peer_id)
        for addr in peer.addrs:
            num_bytes = len(addr)
            size += num_bytes + (2 if num_bytes < _SHORT else 3)
        total += size + (2 if size < _SHORT else 3)
    return total


def _text_bytes(*texts: str | bytes) -> int:
    """Return the size of fields of bytes or ASCII text. Empty ones are not encoded."""
    return sum([_field_bytes(len(text)) for text in texts if text])


def _number_bytes(*numbers: int) -> int:
    """Return the size of fields of whole numbers. Zeros are not encoded."""
    return sum([1 + _varint_bytes(number) for number in numbers if number])


def _items_bytes(items: Iterable[str | bytes]) -> int:
    """Return the size of a repeated field of bytes or ASCII text."""
    return sum([_field_bytes(len(item)) for item in items])


def _field_bytes(num_bytes: int) -> int:
    """Return the size of a field with a length prefix: a tag of one byte, the length, and `num_bytes`."""
    return num_bytes + 2 if num_bytes < _SHORT else 1 + _varint_bytes(num_bytes) + num_bytes


def _varint_bytes(number: int) -> int:
    return max(1, -(-number.bit_length() // 7))
