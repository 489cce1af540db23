"""Encodes and parses the messages of libp2p's circuit relay v2 that Swarm's relays, and peers behind them, need.

The bytes are those of the specification (libp2p/specs, relay/circuit-v2.md), so that the daemon's own client can dial
through Swarm's relays, and be dialled. Pure functions of bytes, without sockets.
"""

from __future__ import annotations

from enum import IntEnum

from swarm_protocol.wire import decode_varint, encode_varint

HOP = "/libp2p/circuit/relay/0.2.0/hop"
"""Protocol to the relay: ask for a reservation, or for a connection to a peer that has one."""

STOP = "/libp2p/circuit/relay/0.2.0/stop"
"""Protocol from the relay to the target of a connection."""

MAX_MESSAGE_BYTES = 4096

_TYPE, _PEER, _STOP_STATUS, _HOP_STATUS = 1, 2, 4, 5
_PEER_ID = 1
_MAX_PEER_ID_BYTES = 64


class HopMessage(IntEnum):
    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopMessage(IntEnum):
    CONNECT = 0
    STATUS = 1


class CircuitStatus(IntEnum):
    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400


def reserve_request() -> bytes:
    return _message({_TYPE: HopMessage.RESERVE})


def hop_status(status: CircuitStatus) -> bytes:
    """Encode a status that names no limits, so that the daemon treats the circuit like any other connection."""
    return _message({_TYPE: HopMessage.STATUS, _HOP_STATUS: status})


def stop_request(source: bytes) -> bytes:
    """Encode the request to a target. `source` is the binary id of the peer that wants to connect."""
    return _message({_TYPE: StopMessage.CONNECT, _PEER: _fields_bytes({_PEER_ID: source})})


def parse_hop_request(body: bytes) -> bytes | None:
    """Return the binary id of the peer to connect to, or None for a request for a reservation. Raises ValueError."""
    fields = _parse(body)
    match fields.get(_TYPE):
        case HopMessage.RESERVE:
            return None
        case HopMessage.CONNECT:
            peer = fields.get(_PEER)
            peer_id = _parse(peer).get(_PEER_ID) if isinstance(peer, bytes) else None
            if isinstance(peer_id, bytes) and 0 < len(peer_id) <= _MAX_PEER_ID_BYTES:
                return peer_id
    raise ValueError("neither a reservation nor a connection with a peer")


def check_hop_accepted(body: bytes) -> None:
    """Raises ValueError unless the relay accepted. The text is its answer."""
    _check_status(_parse(body), HopMessage.STATUS, _HOP_STATUS)


def check_stop_accepted(body: bytes) -> None:
    """Raises ValueError unless the target accepted. The text is its answer."""
    _check_status(_parse(body), StopMessage.STATUS, _STOP_STATUS)


def _check_status(fields: dict[int, int | bytes], kind: int, field: int) -> None:
    if fields.get(_TYPE) != kind or field not in fields:
        raise ValueError("the answer is malformed")
    if fields[field] != CircuitStatus.OK:
        raise ValueError(f"the answer has status {fields[field]!r}")


def _message(fields: dict[int, int | bytes]) -> bytes:
    body = _fields_bytes(fields)
    return encode_varint(len(body)) + body


def _fields_bytes(fields: dict[int, int | bytes]) -> bytes:
    parts = []
    for number, value in fields.items():
        if isinstance(value, int):
            parts.append(encode_varint(number << 3) + encode_varint(value))
        else:
            parts.append(encode_varint(number << 3 | 2) + encode_varint(len(value)) + value)
    return b"".join(parts)


def _parse(body: bytes) -> dict[int, int | bytes]:
    """Return Protobuf's varints and byte strings by field number; of a repeated field the last. These messages have no
    other types. Raises ValueError."""
    fields: dict[int, int | bytes] = {}
    at = 0
    while at < len(body):
        tag, at = decode_varint(body, at)
        value, at = decode_varint(body, at)
        if tag & 7 == 0:
            fields[tag >> 3] = value
        elif tag & 7 == 2 and at + value <= len(body):
            fields[tag >> 3] = body[at : at + value]
            at += value
        else:
            raise ValueError("not a message of a relay")
    return fields
