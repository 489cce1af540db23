"""Breaks a message at its joints: fields, their types and lengths, nesting, and numbers at their bounds.

A message is taken apart as protobuf writes it, without its descriptor. What looks like a message inside a field counts
as one.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from swarm_protocol.wire import decode_varint, encode_varint

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_NUM_BYTES = {_FIXED64: 8, _FIXED32: 4}
_WIRE_TYPES = (_VARINT, _FIXED64, _DELIMITED, 3, 4, _FIXED32, 6, 7)  # 3 and 4 are groups; 6 and 7 are none

_INTS = (0, 1, 2, 127, 128, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, -1.0, 5e-324, 1e38, math.inf, -math.inf, math.nan)
_TEXTS = (b"", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[31m", "\u202e".encode(), b"x" * 300, "\u3164".encode())
_NUMBERS = (1, 15, 16, 1000, 19_000, 2**29 - 1)
_MOST_NESTED = 200

_VERSION_BYTES, _LENGTH_BYTES = 1, 4


@dataclass(frozen=True, slots=True)
class _Field:
    """`content` are the bytes of a number, or of what follows a length. `lie` is added to that length."""

    number: int
    wire_type: int
    content: bytes
    lie: int = 0

    def encoded(self) -> bytes:
        length = encode_varint(max(0, len(self.content) + self.lie)) if self.wire_type == _DELIMITED else b""
        return encode_varint(self.number << 3 | self.wire_type) + length + self.content


_Message: TypeAlias = Sequence[_Field]


def restructured(example: bytes, chance: random.Random) -> bytes | None:
    """Return the message with one or a few fields broken, or None if it has no fields. It begins with a version, after
    which a header may have its length."""
    start = _VERSION_BYTES
    if (fields := _fields(example[start:])) is None:
        start += _LENGTH_BYTES
        end = start + int.from_bytes(example[_VERSION_BYTES:start], "little")
        if not (fields := _fields(example[start:end])):
            return None
        header = _encoded(_broken(fields, chance))
        return example[:_VERSION_BYTES] + len(header).to_bytes(_LENGTH_BYTES, "little") + header + example[end:]
    for _ in range(chance.choice((1, 1, 2, 4))):
        fields = _broken(fields, chance)
    return example[:start] + _encoded(fields)


def _fields(data: bytes) -> _Message | None:
    """Return the fields of a message, or None for bytes that are none."""
    fields, at = [], 0
    try:
        while at < len(data):
            tag, at = decode_varint(data, at)
            wire_type, begin = tag & 7, at
            if wire_type == _VARINT:
                _, at = decode_varint(data, at)
            elif wire_type == _DELIMITED:
                length, begin = decode_varint(data, at)
                at = begin + length
            else:
                at += _NUM_BYTES[wire_type]
            if at > len(data) or not tag >> 3:
                return None
            fields.append(_Field(tag >> 3, wire_type, data[begin:at]))
    except (ValueError, KeyError):
        return None
    return fields


def _encoded(fields: _Message) -> bytes:
    return b"".join(each.encoded() for each in fields)


def _broken(fields: _Message, chance: random.Random) -> _Message:
    if not fields:
        return (_Field(chance.choice(_NUMBERS), _DELIMITED, chance.choice(_TEXTS)),)
    at = chance.randrange(len(fields))
    before, one, after = fields[:at], fields[at], fields[at + 1 :]
    inner = _fields(one.content) if one.wire_type == _DELIMITED else None
    if inner and chance.random() < 0.6:
        return [*before, replace(one, content=_encoded(_broken(inner, chance))), *after]
    match chance.randrange(6):
        case 0:
            return [*after, *before]
        case 1:
            return [*after, one, *before]
        case 2:
            # rarely more often than a message may have values, since counting them takes long
            most = 2**18 if chance.random() < 0.01 else 2**12
            return [*before, *[one] * chance.choice((2, most // (len(one.content) + 2))), *after]
        case 3:
            return [*fields, _Field(chance.choice(_NUMBERS), chance.choice(_WIRE_TYPES), chance.choice(_TEXTS))]
    return [*before, _other(one, chance), *after]


def _other(one: _Field, chance: random.Random) -> _Field:
    """Return the field with another type, length, depth or content."""
    match chance.randrange(6):
        case 0:
            return replace(one, wire_type=chance.choice(_WIRE_TYPES))
        case 1 if one.wire_type == _DELIMITED:
            return replace(one, lie=chance.choice((-1, 1, 2**31, 2**62)))
        case 2 if one.wire_type == _DELIMITED:
            nested = one
            for _ in range(chance.choice((1, 3, _MOST_NESTED))):
                nested = replace(one, content=nested.encoded())
            return nested
    return replace(one, content=_other_content(one, chance))


def _other_content(one: _Field, chance: random.Random) -> bytes:
    match one.wire_type:
        case 0:
            value = chance.choice(_INTS)
            return _overlong(value) if chance.random() < 0.2 else encode_varint(value)
        case 1:
            return struct.pack("<d", chance.choice(_FLOATS))
        case 5:
            return struct.pack("<f", chance.choice(_FLOATS))
    return chance.choice((*_TEXTS, one.content[:-1], one.content + b"x", one.content * 2))


def _overlong(value: int) -> bytes:
    """Return a varint of ten bytes, of which the last ones say nothing, or of eleven, which no reader takes."""
    short = encode_varint(value)
    return (short[:-1] + bytes([short[-1] | 0x80]) + b"\x80" * 10)[:9] + (b"\x00" if value % 2 else b"\x80\x00")
