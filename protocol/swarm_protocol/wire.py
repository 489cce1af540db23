"""The step between bytes and values: size check, message version, protobuf, dataclass.

Every message that stands alone on the wire is one version byte and then a protobuf message, mirrored by a frozen
dataclass whose fields have the message's names. To add one:

1. write it in `proto/<topic>.proto` and run `make proto`;
2. write the dataclass in `<topic>_messages.py`, checking each field in `__post_init__` with `swarm_protocol.checks`
   against bounds in `swarm_protocol.limits` (ValueError otherwise);
3. derive it from `WireMessage`, which has `to_bytes` and `from_bytes`, and say what these need

       PROTO = topic_pb2.Vote
       MAX_BYTES = limits.MAX_VOTE_BYTES

4. give an example in `tests/protocol/<topic>_examples.py`: property tests and the fuzzer run over `decoders.py` there.

`fill` and `flat` carry scalars, repeated scalars (tuple), maps (dict), optional scalars (None when absent), and
messages in messages, one or repeated, each with the `build` of its own: `flat(cls, {"chunks": flat(ChunkRef)})`.

Unknown protobuf fields are ignored, in signed records too: the signature covers the bytes as they were sent, and no
reader encodes a record again, so an older node goes on working beside a newer one. What an older reader would misread
takes a new MESSAGE_VERSION, which every decoder refuses by name.

Bulk belongs in one `bytes` field, or behind the message (`encode_with_payloads`) where each copy counts: a message of
more than MAX_MESSAGE_VALUES values is refused before it is parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from swarm_protocol import limits
from swarm_protocol.errors import PeerViolation

MESSAGE_VERSION = 1
_LENGTH_BYTES = 4

M = TypeVar("M", bound=Message)
T = TypeVar("T")

_NONE: Mapping[str, Callable[[Any], Any]] = MappingProxyType({})


def encode(message: Message) -> bytes:
    """Equal messages give equal bytes within one version of this software; across versions nothing relies on it."""
    return bytes([MESSAGE_VERSION]) + message.SerializeToString(deterministic=True)


def decode(data: bytes, message_type: type[M], build: Callable[[M], T], *, max_bytes: int) -> T:
    """`build` of the parsed message. Raises PeerViolation for whatever is wrong, a ValueError of `build` included."""
    what = message_type.DESCRIPTOR.name
    if len(data) > max_bytes:
        raise PeerViolation(f"{what} has {len(data)} bytes, more than {max_bytes}")
    if not data:
        raise PeerViolation(f"{what} is empty")
    if data[0] != MESSAGE_VERSION:
        raise PeerViolation(
            f"{what} has message version {data[0]}, and this node reads {MESSAGE_VERSION}",
            remedy="update the older of the two nodes",
        )
    try:
        _check_num_values(data, message_type)
        return build(message_type.FromString(data[1:]))
    except DecodeError as error:
        raise PeerViolation(f"{what} is truncated or malformed") from error
    except ValueError as error:
        raise PeerViolation(f"{what} is invalid: {error}") from error


def encode_with_payloads(message: Message, payloads: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """Bulk beside a header: the version, the header's length in 4 bytes, the header, the payloads."""
    header = message.SerializeToString(deterministic=True)
    return b"".join((bytes([MESSAGE_VERSION]), len(header).to_bytes(_LENGTH_BYTES, "little"), header, *payloads))


def decode_with_payload(
    data: bytes,
    message_type: type[M],
    build: Callable[[M, memoryview], T],
    *,
    max_bytes: int,
    max_header_bytes: int,
) -> T:
    """`build` of the header and a view of what follows it. Raises PeerViolation as `decode`."""
    what = message_type.DESCRIPTOR.name
    if len(data) > max_bytes:
        raise PeerViolation(f"{what} has {len(data)} bytes, more than {max_bytes}")
    start = 1 + _LENGTH_BYTES
    end = start + int.from_bytes(data[1:start], "little")

    def build_both(sent: M) -> T:
        if end > len(data):
            raise ValueError("it is shorter than it says")
        return build(sent, memoryview(data)[end:])

    return decode(data[:1] + data[start:end], message_type, build_both, max_bytes=max_header_bytes)


def fill(message_type: type[M], value: Any) -> M:
    """The protobuf message with the fields of the dataclass instance `value`; None leaves a field absent."""
    return message_type(**_contents(value))


def flat(value_type: Callable[..., T], builds: Mapping[str, Callable[[Any], Any]] = _NONE) -> Callable[[Message], T]:
    """A `build` for a dataclass whose fields are those of the message, one to one.

    `builds` has, for each field that holds messages, what makes a value of one.
    """

    def build(message: Message) -> T:
        return value_type(
            **{
                name: _built(message, name, builds.get(name), has_presence=has_presence)
                for name, has_presence in _message_fields(message.DESCRIPTOR)
            }
        )

    return build


class WireMessage:
    """Base class of a frozen dataclass whose fields are those of a message that stands alone on the wire.

    `NESTED` has a `build` for each field that holds messages, see `flat`.
    """

    __slots__ = ()
    PROTO: ClassVar[type[Message]]
    MAX_BYTES: ClassVar[int]
    NESTED: ClassVar[Mapping[str, Callable[[Any], Any]]] = _NONE

    def to_bytes(self) -> bytes:
        return encode(fill(self.PROTO, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises PeerViolation."""
        return decode(data, cls.PROTO, flat(cls, cls.NESTED), max_bytes=cls.MAX_BYTES)


def _check_num_values(data: bytes, message_type: type[Message]) -> None:
    most = limits.MAX_MESSAGE_VALUES
    # each value takes a byte at least, so a short message has few
    if len(data) > most and count_values(data, 1, message_type.DESCRIPTOR, most=most) > most:
        raise ValueError(f"it has more than {most} values")


# what every message of a type has in common is looked up once: a node reads and writes hundreds a second


@cache
def _value_fields(value_type: type) -> tuple[str, ...]:
    """The names of a dataclass's fields; none for another type."""
    return tuple(field.name for field in fields(value_type)) if is_dataclass(value_type) else ()


@cache
def _message_fields(descriptor: Any) -> tuple[tuple[str, bool], ...]:
    """The names of a message's fields, and whether each can be absent."""
    return tuple((field.name, field.has_presence) for field in descriptor.fields)


def _contents(value: Any) -> Any:
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, tuple):
        return [_contents(item) for item in value]
    value_type: Any = type(value)
    if names := _value_fields(value_type):
        return {name: _contents(getattr(value, name)) for name in names}
    return value


def _built(message: Message, name: str, build: Callable[[Any], Any] | None, *, has_presence: bool) -> Any:
    if has_presence and not message.HasField(name):
        return None
    value = getattr(message, name)
    if isinstance(value, str | bytes):
        return value if build is None else build(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return tuple(value) if build is None else tuple(build(item) for item in value)
    return value if build is None else build(value)


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


MAX_VARINT_BYTES = 10
"""Maximum bytes of a varint: 64 bits, protobuf's largest."""


def encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def decode_varint(data: bytes, at: int, *, max_bytes: int = MAX_VARINT_BYTES) -> tuple[int, int]:
    """The number at `at`, and where it ends. Raises ValueError for one that does not end within `max_bytes`."""
    number = 0
    for index, byte in enumerate(data[at : at + max_bytes]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, at + index + 1
    raise ValueError("a number does not end")
