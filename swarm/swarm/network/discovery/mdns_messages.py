"""Encodes and decodes queries and answers of nodes in one local network by multicast DNS (RFC 6762, RFC 6763).

They follow libp2p's specification of mDNS: a query asks for the PTR records of a service, and an answer has one
instance, whose TXT record holds `dnsaddr=/ip4/…/tcp/…/p2p/…`. The service's name follows from the network, so that
networks do not hear of each other's nodes. Deviation: an instance is named by its peer id, which its addresses show
anyway.

Anyone in the local network can send a packet, and a general parser of DNS packets (RFC 1035, section 4) can be kept
busy by names with many pointers, by hundreds of records, and by rare record types. So `read_packet` checks the counts
of a packet before it parses anything else, names have few labels and pointers, and the data of records is not parsed.
That is a few hundred steps at most, besides slices of the packet. Only addresses in the receiver's own subnets are
accepted. Pure.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from swarm_protocol import limits
from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import ConfigError, PeerViolation
from swarm_protocol.network_invitation import NetworkSecret

from swarm.network.discovery.own_networks import Subnet
from swarm.network.ip_kinds import kind_of
from swarm.network.multiaddr import PeerAddr, ip_of, is_relayed, parse_peer_addr

PTR, TXT, ANY = 12, 16, 255
"""Types of records; ANY is only the type of a question."""

IN = 1
MAX_QUESTIONS = 16
MAX_RECORDS = 32
MAX_LABELS = 16
MAX_POINTERS = 4
"""Maximum pointers in one name. Nodes write at most one."""

TTL_S = 120
"""Seconds for which an answer is valid."""

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
    """`questions` are pairs of a name and a type. `records` are those of all sections."""

    is_answer: bool
    questions: tuple[tuple[Name, int], ...]
    records: tuple[Record, ...]


def name_of(text: str) -> Name:
    return tuple(text.rstrip(".").lower().encode().split(b"."))


def read_packet(packet: bytes) -> Packet:
    """Parse a packet. Raises ValueError if it is malformed or exceeds the bounds."""
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
    """Return the name at `at` and the offset behind it. Raises ValueError or IndexError."""
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
    """Yield the strings in the data of a TXT record, up to the first that is cut off."""
    at = 0
    while at < len(data) and at + 1 + data[at] <= len(data):
        yield data[at + 1 : at + 1 + data[at]]
        at += 1 + data[at]


def write_instance(service: Name, label: bytes, strings: Sequence[bytes]) -> bytes:
    """Return an answer with `label` as the one instance of a service, and `strings` in its TXT record.

    Each string has at most MAX_STRING_BYTES.
    """
    header = _HEADER.pack(0, _IS_ANSWER | _IS_AUTHORITATIVE, 0, 1, 0, 1)
    service_at = len(header)
    instance = bytes([len(label)]) + label + _pointer(service_at)
    pointing = _write_name(service) + _RECORD.pack(PTR, IN, TTL_S, len(instance))
    instance_at = service_at + len(pointing)
    texts = b"".join(bytes([len(text)]) + text for text in strings)
    return header + pointing + instance + _pointer(instance_at) + _RECORD.pack(TXT, IN, TTL_S, len(texts)) + texts


def _write_name(name: Name) -> bytes:
    return b"".join(bytes([len(label)]) + label for label in name) + b"\0"


def _pointer(to: int) -> bytes:
    return struct.pack("!H", _POINTER << 8 | to)


MAX_PACKET_BYTES = 4096
"""Maximum bytes of a packet that is read. Eight addresses take 1 KiB. RFC 6762 allows 9000 bytes."""

MAX_TXT_STRINGS = 2 * limits.MAX_CONTACT_ADDRS
"""Maximum strings that are read in an answer, each of which may be an address. Nodes write at most half as many."""

_ADDR_TEXT = "dnsaddr="
_SEALED = b"sealed="
_NUM_NAME_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MdnsQuery:
    """A query for the nodes of the network."""


def service_of(network_id: str, secret: NetworkSecret | None = None) -> str:
    """Return the service that stands for a network: `_swarm-` and 8 letters of the SHA-256 digest of its id in base32.

    For a private network, a name that follows from its secret replaces the id. A service name has at most 15
    characters, from a smaller set than those of network ids (RFC 6763, section 7).
    """
    name = secret.discovery_name if secret else network_id
    digest = base64.b32encode(hashlib.sha256(name.encode()).digest()).decode().lower()
    return f"_swarm-{digest[:_NUM_NAME_CHARS]}._udp.local."


def query(service: str) -> bytes:
    return _HEADER.pack(0, 0, 1, 0, 0, 0) + _write_name(name_of(service)) + _QUESTION.pack(PTR, IN)


def answer(service: str, peer_id: str, addrs: Iterable[str], secret: NetworkSecret | None = None) -> bytes:
    """Return an answer that `peer_id` is at the first few of `addrs`. With a `secret`, only members can read it."""
    told = [f"{_ADDR_TEXT}{PeerAddr(peer_id=peer_id, addr=addr)}".encode() for addr in addrs]
    instance = peer_id
    if secret is not None:
        told = [_SEALED + base64.b64encode(secret.seal(text, service.encode())) for text in told]
        instance = secret.protocol_name(peer_id).removeprefix("/")
    fitting = [text for text in told if len(text) <= MAX_STRING_BYTES][: limits.MAX_CONTACT_ADDRS]
    return write_instance(name_of(service), instance.encode(), fitting)


def read_message(
    packet: bytes, service: str, subnets: Sequence[Subnet], secret: NetworkSecret | None = None
) -> MdnsQuery | Contact | None:
    """Return the query or the contact for `service` in a packet; None if there is none, or none that is acceptable.

    `subnets` are the receiver's subnets on the interface at which the packet came in. Only private and link-local
    addresses inside these count. An answer with addresses of two peers is dropped.
    """
    if len(packet) > MAX_PACKET_BYTES:
        return None
    try:
        said = read_packet(packet)
    except ValueError:
        return None
    wanted = name_of(service)
    asked = ((each.name, each.kind) for each in said.records) if said.is_answer else said.questions
    if not any(name == wanted and kind in (PTR, ANY) for name, kind in asked):
        return None
    return _contact(said.records, wanted, subnets, secret) if said.is_answer else MdnsQuery()


def _contact(
    records: Sequence[Record], wanted: Name, subnets: Sequence[Subnet], secret: NetworkSecret | None
) -> Contact | None:
    texts = (
        text
        for each in records
        if each.kind == TXT and each.name[-len(wanted) :] == wanted
        for text in strings_of(each.data)
    )
    clear = (text if secret is None else _unsealed(text, wanted, secret) for text in islice(texts, MAX_TXT_STRINGS))
    found = [addr for text in clear if (addr := _near(text, subnets)) is not None]
    peer_ids = {addr.peer_id for addr in found}
    if len(peer_ids) != 1:
        return None
    addrs = tuple(dict.fromkeys(addr.addr for addr in found))[: limits.MAX_CONTACT_ADDRS]
    return Contact(peer_id=peer_ids.pop(), addrs=addrs)


def is_near(addr: str, subnets: Iterable[Subnet]) -> bool:
    """Return whether an address is private or link-local, and in one of these subnets."""
    ip = ip_of(addr)
    if ip is None or is_relayed(addr) or kind_of(ip) not in ("private", "link-local"):
        return False
    if ip.version == 6 and ip.is_link_local:
        return False  # it cannot be dialled without a zone
    return any(ip.version == subnet.network.version and ip in subnet.network for subnet in subnets)


def _unsealed(text: bytes, wanted: Name, secret: NetworkSecret) -> bytes:
    """Return what a member sealed in one string of a TXT record; b"" if no member sealed it."""
    service = b".".join(wanted) + b"."
    try:
        return secret.open(base64.b64decode(text.removeprefix(_SEALED), validate=True), service)
    except (ValueError, PeerViolation):
        return b""


def _near(text: bytes, subnets: Sequence[Subnet]) -> PeerAddr | None:
    """Return the address in one string of a TXT record; None if there is none, or `is_near` is False for it."""
    if not text.startswith(_ADDR_TEXT.encode()):
        return None
    try:
        addr = parse_peer_addr(text.decode("ascii").removeprefix(_ADDR_TEXT))
    except (UnicodeDecodeError, ConfigError):
        return None
    return addr if is_near(addr.addr, subnets) else None
