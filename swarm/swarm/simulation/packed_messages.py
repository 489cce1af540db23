"""Packs messages for another process of a simulation. Pure.

Messages of the record DHT become tuples for `marshal` in which nodes are numbers. All other messages are encoded as on
the wire. The processes know the same nodes by the same numbers.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from swarm_protocol.dht_messages import (
    Contact,
    FindRequest,
    FindResponse,
    Found,
    StoreRequest,
    StoreResponse,
    contact_of,
)
from swarm_protocol.wire import WireMessage, encoded, handed, message_in

Packed: TypeAlias = Any
"""Bytes, or a tuple whose first item is one of the numbers below."""

_FIND, _FOUND, _STORE, _STORED = range(4)


class Packer:
    """Packs and unpacks messages of the nodes that were added. Node numbers are positive."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._addrs: dict[int, tuple[str, ...]] = {}
        self._contacts: dict[int, Contact] = {}
        """By node number. A contact without addresses has the negative number."""

    def add(self, number: int, peer_id: str, addr: str) -> None:
        """Add a node, whose only address is `addr`."""
        self._numbers[peer_id] = number
        self._addrs[number] = (addr,)
        self._contacts[number] = contact_of(peer_id=peer_id, addrs=(addr,))
        self._contacts[-number] = contact_of(peer_id=peer_id)

    def number_of(self, peer_id: str) -> int:
        return self._numbers[peer_id]

    def pack(self, data: bytes) -> Packed:
        """Pack a message of one of the nodes, given what its `to_bytes` returned."""
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
        """Return the message that the node `sender` packed, in a form that its receiver's `from_bytes` takes."""
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
