"""Converts between bytes and values: size check, message version, protobuf, dataclass.

Every message that stands alone on the wire is one version byte and then a protobuf message, mirrored by a frozen
dataclass whose fields have the message's names. To add one:

1. write it in `proto/<topic>.proto` and run `make proto`;
2. write the dataclass in `<topic>_messages.py`, naming in the annotation of each field its check of
   `swarm_protocol.checks`, with a bound in `swarm_protocol.limits`;
3. derive it from `WireMessage`, which checks it and has `to_bytes` and `from_bytes`, and say what these need

       PROTO = topic_pb2.Vote
       MAX_BYTES = limits.MAX_VOTE_BYTES

4. give an example in `tests/protocol/<topic>_examples.py`: property tests and the fuzzer run over `decoders.py` there.

`writer` and `reader` compile one function for each message type, as dataclasses compile their `__init__`: messages are
encoded and decoded for every token, and a loop would look up the kind of each field each time. Messages carry scalars,
repeated scalars (tuple), maps (dict), optional scalars (None if absent), and nested messages, single or repeated, if
the field's annotation names their dataclass. An absent nested message is refused unless the annotation allows None.

Unknown protobuf fields are ignored, even in signed records: the signature covers the bytes as they were sent, and no
reader encodes a record again, so an older node keeps working beside a newer one. A change that an older reader would
misread needs a new MESSAGE_VERSION, which an older decoder refuses by name.

Bulk data belongs in one `bytes` field, or after the message (`encode_with_payloads`) if each copy counts: a message of
more than MAX_MESSAGE_VALUES values is refused before it is parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, TypeAlias, TypeVar, get_args

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from swarm_protocol import limits
from swarm_protocol.checks import Checked, check_num_items, hints_of, made_function, max_items_of
from swarm_protocol.errors import PeerViolation

MESSAGE_VERSION = 1
_LENGTH_BYTES = 4

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def encode(message: Message) -> bytes:
    """Return the message's bytes. Equal messages give equal bytes within one version of this software, but perhaps not
    across versions."""
    return bytes([MESSAGE_VERSION]) + message.SerializeToString(deterministic=True)


def decode(data: bytes, message_type: type[M], build: Callable[[M], T], *, max_bytes: int) -> T:
    """Parse `data`, and return what `build` makes of the message. Raises PeerViolation for bytes that are no valid
    message, and for a ValueError of `build`."""
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
    """Return a message with bulk data: the version, the header's length in 4 bytes, the header, the payloads."""
    header = message.SerializeToString(deterministic=True)
    return b"".join((bytes([MESSAGE_VERSION]), len(header).to_bytes(_LENGTH_BYTES, "little"), header, *payloads))


def decode_with_payload(
    data: bytes, message_type: type[M], build: Callable[[M, memoryview], T], *, max_bytes: int, max_header_bytes: int
) -> T:
    """Parse the header, and return what `build` makes of it and of a view of the payloads. Raises PeerViolation as
    `decode` does."""
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


@dataclass(frozen=True, slots=True)
class FieldForm:
    """Says how to convert a field that has another type in its protobuf message than in its dataclass.

    If the field is a message, `write(sent, value)` fills that message from a value that is not None; otherwise
    `write(value)` returns what the field is to hold. `read(sent)` returns the dataclass's value. If `read` is None, the
    caller of the reader passes the value as an argument with the field's name.
    """

    write: Callable[..., Any]
    read: Callable[[Any], Any] | None


Forms: TypeAlias = Mapping[str, FieldForm]
_NO_FORMS: Forms = {}


def writer(value_type: type[Any], descriptor: Any, forms: Forms = _NO_FORMS) -> Callable[[Any, Any], None]:
    """Return `write(sent, value)`, which fills a message with a dataclass instance; None leaves a field absent."""
    lines, names = [], dict[str, Any]()
    inner = _inner_types(value_type)
    for field in descriptor.fields:
        name, form = field.name, forms.get(field.name)
        if form is not None:
            names[f"write_{name}"] = form.write
        elif name in inner:
            names[f"write_{name}"] = _inner_writer(inner[name], field)
        lines.append(_writing_line(field, form, is_inner=name in inner and form is None))
    if not any(line.startswith("sent.") and " = " in line for line in lines):
        lines.append("sent.SetInParent()")  # marks the message as present even if no field is set
    write: Callable[[Any, Any], None] = made_function("write", "sent, value", lines, names)
    return write


def _writing_line(field: Any, form: FieldForm | None, *, is_inner: bool) -> str:
    """Return the line of `writer` that fills `field`."""
    name, presence_guard = field.name, f"if value.{field.name} is not None: "
    if field.is_repeated and is_inner:
        return f"for each in value.{name}: write_{name}(sent, each)"
    if field.is_repeated:
        content = f"value.{name}" if form is None else f"write_{name}(value.{name})"
        return f"sent.{name}.{'update' if _is_map(field) else 'extend'}({content})"
    if field.message_type is not None:
        return f"{presence_guard}write_{name}(sent.{name}, value.{name})"
    if form is not None:
        return f"sent.{name} = write_{name}(value.{name})"
    return f"{presence_guard if field.has_presence else ''}sent.{name} = value.{name}"


def _inner_writer(value_type: Any, field: Any) -> Callable[[Any, Any], None]:
    """Return `write(sent, value)`, which fills a field's message, or adds one to the message that has a repeated field.
    For a class whose values are `REMEMBERED`, each value is encoded once."""
    write = writer(value_type, field.message_type)
    if not field.is_repeated:
        return write
    name, tag = field.name, encode_varint(field.number << 3 | _DELIMITED)
    message_type: Any = field.message_type._concrete_class

    @lru_cache(maxsize=getattr(value_type, "REMEMBERED", 0))
    def encoded(value: Any) -> bytes:
        message = message_type()
        write(message, value)
        content: bytes = message.SerializeToString(deterministic=True)
        return tag + encode_varint(len(content)) + content

    def add_remembered(sent: Any, value: Any) -> None:
        sent.MergeFromString(encoded(value))

    def add(sent: Any, value: Any) -> None:
        write(getattr(sent, name).add(), value)

    return add_remembered if hasattr(value_type, "REMEMBERED") else add


def _inner_reader(value_type: Any, descriptor: Any) -> Callable[[Any], Any]:
    """Return the function that makes a `value_type` from its message. For a class whose values are `REMEMBERED`, each
    value is decoded and checked once."""
    read, message_type = reader(value_type, descriptor), descriptor._concrete_class
    if not hasattr(value_type, "REMEMBERED"):
        return read

    decoded = lru_cache(maxsize=value_type.REMEMBERED)(lambda data: read(message_type.FromString(data)))
    return lambda sent: decoded(sent.SerializeToString())


def reader(value_type: Callable[..., T], descriptor: Any, forms: Forms = _NO_FORMS) -> Callable[..., T]:
    """Return a function that makes a `value_type` from a message with the same fields."""
    names: dict[str, Any] = {"value_type": maker(value_type), "absent": _absent, "check_num_items": check_num_items}
    inner, hints = _inner_types(value_type), _hints_of(value_type)
    arguments, given = list[str](), list[str]()
    for field in descriptor.fields:
        name, form = field.name, forms.get(field.name)
        if form is not None and form.read is None:
            given.append(name)
            arguments.append(f"{name}={name}")
            continue
        if form is not None:
            names[f"read_{name}"] = form.read
        elif name in inner:
            names[f"read_{name}"] = _inner_reader(inner[name], field.message_type)
        arguments.append(f"{name}={_reading(field, form, hints.get(name), is_inner=name in inner)}")
    lines = [f"return value_type({', '.join(arguments)})"]
    read: Callable[..., T] = made_function("read", ", ".join(["sent", *given]), lines, names)
    return read


def _reading(field: Any, form: FieldForm | None, hint: Any, *, is_inner: bool) -> str:
    """Return the expression of `reader` for the value of `field`."""
    name, value = field.name, f"sent.{field.name}"
    if form is not None or (is_inner and not field.is_repeated):
        value = f"read_{name}({value})"
    elif is_inner:
        if (most := max_items_of(hint)) is not None:  # too many items are refused before any is read
            value = f"check_num_items({value}, {name!r}, max_items={most})"
        value = f"tuple([read_{name}(each) for each in {value}])"
    elif field.is_repeated:
        value = f"dict({value})" if _is_map(field) else f"tuple({value})"
    if not field.has_presence:
        return value
    is_needed = is_inner and type(None) not in get_args(hint)
    return f"{value} if sent.HasField({name!r}) else {f'absent({name!r})' if is_needed else 'None'}"


def _absent(field: str) -> NoReturn:
    raise ValueError(f"it has no {field}")


@cache
def maker(value_type: Callable[..., T]) -> Callable[..., T]:
    """Return the function that makes a checked `value_type` from its fields. If the class is `REMEMBERED`, equal fields
    give the same object, among that many of the last ones. Peers send some values repeatedly."""
    most = getattr(value_type, "REMEMBERED", 0)
    return lru_cache(maxsize=most)(value_type) if most else value_type


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _inner_types(value_type: Any) -> dict[str, type[Any]]:
    """Return the dataclasses that the annotations of a dataclass's fields name."""
    return {name: inner for name, hint in _hints_of(value_type).items() if (inner := _dataclass_in(hint))}


def _hints_of(value_type: Any) -> dict[str, Any]:
    return hints_of(value_type) if hasattr(value_type, "__dataclass_fields__") else {}


def _dataclass_in(hint: Any) -> type[Any] | None:
    """Return the dataclass that an annotation names by itself, in a tuple, or with None."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint
    return next((found for inner in get_args(hint) if (found := _dataclass_in(inner))), None)


class WireMessage(Checked):
    """Base class of a frozen dataclass whose fields are those of a message that stands alone on the wire."""

    __slots__ = ()
    PROTO: ClassVar[type[Message]]
    MAX_BYTES: ClassVar[int]

    def to_bytes(self) -> bytes:
        if (size_of := _handed_sizes.get().get(type(self))) is not None:
            stand_in = _Handed(size_of(self))
            stand_in.message = self
            return stand_in
        return encoded(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode one message. Raises PeerViolation."""
        message_type: Any = cls
        if isinstance(data, _Handed) and isinstance(data.message, cls):
            return data.message
        found: Self = decode(data, cls.PROTO, _codec(message_type).read, max_bytes=cls.MAX_BYTES)
        return found


def encoded(message: WireMessage) -> bytes:
    """Return the bytes of a message, also while messages of its type are handed over."""
    message_type: Any = type(message)
    sent = message.PROTO()
    _codec(message_type).write(sent, message)
    return encode(sent)


class _Handed(bytes):
    """A placeholder for the bytes of `message`. It has their length, but their content only if that was encoded,
    too."""

    message: WireMessage


_handed_sizes: ContextVar[Mapping[type[WireMessage], Callable[[Any], int | bytes]]] = ContextVar(
    "sizes of messages that are handed over", default=MappingProxyType({})
)


@contextmanager
def handing_over(sizes: Mapping[type[WireMessage], Callable[[Any], int | bytes]]) -> Iterator[None]:
    """Hand messages of these types to their receivers as objects, without decoding, inside this context and the tasks
    that begin in it. `sizes` returns for each the number of its bytes on the wire, or, for messages that are needed in
    bytes, what `encoded` returns."""
    token = _handed_sizes.set(sizes)
    try:
        yield
    finally:
        _handed_sizes.reset(token)


class _Codec(NamedTuple):
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


@cache
def _codec(message_type: Any) -> _Codec:
    descriptor = message_type.PROTO.DESCRIPTOR
    return _Codec(writer(message_type, descriptor), reader(message_type, descriptor))


def _check_num_values(data: bytes, message_type: type[Message]) -> None:
    most = limits.MAX_MESSAGE_VALUES
    # each value takes at least a byte, so a short message has few values
    if len(data) > most and count_values(data, 1, message_type.DESCRIPTOR, most=most) > most:
        raise ValueError(f"it has more than {most} values")


# wire types; the two of groups are not in proto3, and refused
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_COUNTED_AS_ONE = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def count_values(data: bytes, start: int, descriptor: Any, *, most: int) -> int:
    """Count the fields in `data` from `start` on, including those of nested messages and the numbers packed into them.

    Texts and bytes count as one, and so does any field that `descriptor` does not know. Counting stops soon after
    `most`; a packed number counts once for each of its bytes. Raises ValueError for invalid fields.
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
            elif field is not None and field.type not in _COUNTED_AS_ONE:
                num_values += length
            if num_values > most:
                return num_values
            position += length
    return num_values


def _content(data: bytes, position: int, wire_type: int) -> tuple[int, int]:
    """Return the length of a field's content, and where it begins."""
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
    """Return the number at `at`, and where it ends. Raises ValueError for one that does not end within `max_bytes`."""
    number = 0
    for index, byte in enumerate(data[at : at + max_bytes]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, at + index + 1
    raise ValueError("a number does not end")
