"""The part of the packet format of DNS that multicast DNS is used with here (RFC 1035, section 4), bounded.

A host of the local network may send anything, and a general parser can be kept busy: by names of many pointers, by
hundreds of records, and by rare record types. So the counts of a packet are checked before anything is parsed, names
have few labels and pointers, and the data of a record stays as it came. Reading a packet takes a few hundred steps at
most, apart from slices of it. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PTR, TXT, ANY = 12, 16, 255
"""Types of records, and of questions for any."""

IN = 1

MAX_QUESTIONS = 16
MAX_RECORDS = 32
MAX_LABELS = 16
MAX_POINTERS = 4
"""In one name. Nodes write two labels and one pointer at most."""

MAX_LABEL_BYTES = 63
MAX_STRING_BYTES = 255

_HEADER = struct.Struct("!6H")  # id, flags, and the numbers of questions, answers, authorities and additional records
_QUESTION = struct.Struct("!HH")  # type, class
_RECORD = struct.Struct("!HHIH")  # type, class, lifetime in seconds, bytes of data
_IS_ANSWER = 0x8000
_IS_AUTHORITATIVE = 0x0400
_POINTER = 0xC0

Name = tuple[bytes, ...]
"""The labels of a name, in lower case."""


@dataclass(frozen=True, slots=True)
class Record:
    name: Name
    kind: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """`questions` are the names that are asked for, with the type. `records` are those of all sections."""

    is_answer: bool
    questions: tuple[tuple[Name, int], ...]
    records: tuple[Record, ...]


def name_of(text: str) -> Name:
    return tuple(text.rstrip(".").lower().encode().split(b"."))


def read_packet(packet: bytes) -> Packet:
    """Raises ValueError for a packet that is malformed, or beyond the bounds."""
    try:
        _, flags, num_questions, *nums_records = _HEADER.unpack_from(packet)
        if num_questions > MAX_QUESTIONS or sum(nums_records) > MAX_RECORDS:
            raise ValueError("too many questions or records")
        at, questions, records = _HEADER.size, [], []
        for _ in range(num_questions):
            name, at = _read_name(packet, at)
            kind, _ = _QUESTION.unpack_from(packet, at)
            at += _QUESTION.size
            questions.append((name, kind))
        for _ in range(sum(nums_records)):
            name, at = _read_name(packet, at)
            kind, _, _, num_bytes = _RECORD.unpack_from(packet, at)
            at += _RECORD.size + num_bytes
            if at > len(packet):
                raise ValueError("a record ends beyond the packet")
            records.append(Record(name, kind, packet[at - num_bytes : at]))
    except (struct.error, IndexError):
        raise ValueError("the packet is cut off") from None
    return Packet(is_answer=bool(flags & _IS_ANSWER), questions=tuple(questions), records=tuple(records))


def _read_name(packet: bytes, at: int) -> tuple[Name, int]:
    """Return a name and where it ends. Raises ValueError or IndexError."""
    labels: list[bytes] = []
    end, num_pointers = -1, 0
    while size := packet[at]:
        if size >= _POINTER:
            num_pointers += 1
            if num_pointers > MAX_POINTERS:
                raise ValueError("a name has too many pointers")
            end = at + 2 if end < 0 else end
            at = (size - _POINTER) << 8 | packet[at + 1]
        elif size > MAX_LABEL_BYTES or len(labels) >= MAX_LABELS:
            raise ValueError("a name has a label that is malformed, or too many")
        else:
            labels.append(packet[at + 1 : at + 1 + size].lower())
            at += 1 + size
    return tuple(labels), at + 1 if end < 0 else end


def strings_of(data: bytes) -> Iterator[bytes]:
    """Yield the strings in the data of a TXT record, as long as they are whole."""
    at = 0
    while at < len(data) and at + 1 + data[at] <= len(data):
        yield data[at + 1 : at + 1 + data[at]]
        at += 1 + data[at]


def write_question(name: Name, kind: int) -> bytes:
    return _HEADER.pack(0, 0, 1, 0, 0, 0) + _write_name(name) + _QUESTION.pack(kind, IN)


def write_instance(service: Name, label: bytes, strings: Sequence[bytes], ttl_s: int) -> bytes:
    """Return an answer that names `label` as the one instance of a service, with the strings in its TXT record.

    Strings have at most MAX_STRING_BYTES.
    """
    header = _HEADER.pack(0, _IS_ANSWER | _IS_AUTHORITATIVE, 0, 1, 0, 1)
    service_at = len(header)
    instance = bytes([len(label)]) + label + _pointer(service_at)
    pointing = _write_name(service) + _RECORD.pack(PTR, IN, ttl_s, len(instance))
    instance_at = service_at + len(pointing)
    texts = b"".join(bytes([len(text)]) + text for text in strings)
    return header + pointing + instance + _pointer(instance_at) + _RECORD.pack(TXT, IN, ttl_s, len(texts)) + texts


def _write_name(name: Name) -> bytes:
    return b"".join(bytes([len(label)]) + label for label in name) + b"\0"


def _pointer(to: int) -> bytes:
    return struct.pack("!H", _POINTER << 8 | to)
