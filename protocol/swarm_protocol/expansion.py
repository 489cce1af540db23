"""How many values a protobuf parser would make of some bytes, counted before it makes any.

A byte of repeated numbers or empty messages takes up to a hundred bytes of memory once parsed, so a message within
its size bound could still fill the memory and stop the event loop for seconds. `wire` asks here first.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from swarm_protocol.varint import decode_varint

# wire types; the two of groups are not in proto3, and refused
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_WHOLE = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def count_values(data: bytes, start: int, descriptor: Any, *, most: int) -> int:
    """The number of fields in `data` from `start` on, in messages within it too, and of the numbers packed into them.

    Texts and bytes count as one, and so does whatever `descriptor` does not know. Stops soon after `most`; a packed
    number counts for each of its bytes. Raises ValueError where no field can be.
    """
    num_values = 0
    open_messages = [(start, len(data), descriptor)]
    while open_messages:
        position, end, descriptor = open_messages.pop()
        while position < end:
            tag, position = decode_varint(data, position)
            length, position = _content(data, position, tag & 7)
            num_values += 1
            if length > end - position:
                raise ValueError("a field is longer than its message")
            field = descriptor.fields_by_number.get(tag >> 3) if tag & 7 == _DELIMITED else None
            if field is not None and field.message_type is not None:
                open_messages.append((position, position + length, field.message_type))
            elif field is not None and field.type not in _WHOLE:
                num_values += length
            if num_values > most:
                return num_values
            position += length
    return num_values


def _content(data: bytes, position: int, wire_type: int) -> tuple[int, int]:
    """The length of a field's content, and where it begins."""
    if wire_type == _VARINT:
        return 0, decode_varint(data, position)[1]
    if wire_type == _DELIMITED:
        return decode_varint(data, position)
    if wire_type not in _FIXED_BYTES:
        raise ValueError("a field has no known wire type")
    return _FIXED_BYTES[wire_type], position
