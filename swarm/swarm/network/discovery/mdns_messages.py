"""Encodes and decodes what nodes of one local network ask and tell each other by multicast DNS (RFC 6762, RFC 6763).

As libp2p's specification of mDNS has it: a query for the PTR records of a service, and answers with one instance each,
whose TXT records hold `dnsaddr=/ip4/…/tcp/…/p2p/…`. The service is named by the network, so that networks do not hear
of each other's nodes. Deviation: instances are named by their peer id, which their addresses tell anyway.

What comes in was written by anybody: `dns_packets` bounds it, and only addresses in the receiver's own subnets are
taken. Pure.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from swarm_protocol import limits
from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import ConfigError, PeerViolation
from swarm_protocol.network_secret import NetworkSecret

from swarm.network.discovery.dns_packets import (
    ANY,
    MAX_STRING_BYTES,
    PTR,
    TXT,
    Name,
    Record,
    name_of,
    read_packet,
    strings_of,
    write_instance,
    write_question,
)
from swarm.network.discovery.own_networks import Subnet, address_of
from swarm.network.ip_kinds import kind_of
from swarm.network.multiaddr import PeerAddr, is_relayed, parse_peer_addr

MAX_PACKET_BYTES = 4096
"""Eight addresses take 1 KiB. RFC 6762 allows 9000 bytes."""

MAX_TXT_STRINGS = 2 * limits.MAX_CONTACT_ADDRS
"""Strings in an answer that are looked at, each of which may be an address. Nodes write half as many."""

TTL_S = 120
_RECORD = "dnsaddr="
_SEALED = b"sealed="
_NUM_NAME_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MdnsQuery:
    """Somebody asks who is there."""


def service_of(network_id: str, secret: NetworkSecret | None = None) -> str:
    """Return the service that stands for a network: `_swarm-` and 8 letters of the SHA-256 digest of its id in base32.

    Of a private network it is the digest of a name that its secret gives. A service name has at most 15
    characters, of fewer kinds than network ids have (RFC 6763, section 7).
    """
    name = secret.discovery_name if secret else network_id
    digest = base64.b32encode(hashlib.sha256(name.encode()).digest()).decode().lower()
    return f"_swarm-{digest[:_NUM_NAME_CHARS]}._udp.local."


def query(service: str) -> bytes:
    return write_question(name_of(service), PTR)


def answer(service: str, peer_id: str, addrs: Iterable[str], secret: NetworkSecret | None = None) -> bytes:
    """Tell that `peer_id` is at `addrs`, of which the first few are named; with a `secret` for members alone."""
    told = [f"{_RECORD}{PeerAddr(peer_id=peer_id, addr=addr)}".encode() for addr in addrs]
    instance = peer_id
    if secret is not None:
        told = [_SEALED + base64.b64encode(secret.seal(text, service.encode())) for text in told]
        instance = secret.protocol_name(peer_id).removeprefix("/")
    fitting = [text for text in told if len(text) <= MAX_STRING_BYTES][: limits.MAX_CONTACT_ADDRS]
    return write_instance(name_of(service), instance.encode(), fitting, TTL_S)


def read_message(
    packet: bytes, service: str, subnets: Sequence[Subnet], secret: NetworkSecret | None = None
) -> MdnsQuery | Contact | None:
    """Return what a packet says of `service`; None if that is nothing, or is not to be believed.

    `subnets` are the receiver's on the interface that the packet came in by. Only addresses inside these count, and
    only private and link-local ones. An answer that names two peers is dropped.
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
    """Return whether an address is a private or link-local one of one of these subnets."""
    ip = address_of(addr)
    if ip is None or is_relayed(addr) or kind_of(ip) not in ("private", "link-local"):
        return False
    if ip.version == 6 and ip.is_link_local:
        return False  # nobody can dial it without a zone
    return any(ip.version == subnet.network.version and ip in subnet.network for subnet in subnets)


def _unsealed(text: bytes, wanted: Name, secret: NetworkSecret) -> bytes:
    """Return what a member sealed in one string of a TXT record; nothing for a string of anybody else."""
    service = b".".join(wanted) + b"."
    try:
        return secret.open(base64.b64decode(text.removeprefix(_SEALED), validate=True), service)
    except (ValueError, PeerViolation):
        return b""


def _near(text: bytes, subnets: Sequence[Subnet]) -> PeerAddr | None:
    """Return the address in one string of a TXT record, if it is one and is near."""
    if not text.startswith(_RECORD.encode()):
        return None
    try:
        addr = parse_peer_addr(text.decode("ascii").removeprefix(_RECORD))
    except (UnicodeDecodeError, ConfigError):
        return None
    return addr if is_near(addr.addr, subnets) else None
