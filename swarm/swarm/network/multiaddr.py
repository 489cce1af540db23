"""Parses and encodes multiaddrs. An error names the part of an address that is wrong.

Text that people type may have only the forms that Swarm's hosts use: /ip4, /ip6, /dns, /dns4 or /dns6 with /tcp, then
perhaps /p2p and /p2p-circuit. QUIC (/udp/…/quic-v1) is not used. The binary form, in which this process and its libp2p
daemon tell each other addresses, also has the paths of Unix sockets, and the zones of link-local IPv6 connections.
Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import base58_decode, base58_encode, check_peer_id
from swarm_protocol.wire import decode_varint, encode_varint

from swarm.network.ip_kinds import kind_of

_EXAMPLE = "/ip4/203.0.113.7/tcp/4001"
_LISTEN_EXAMPLE = "/ip4/0.0.0.0/tcp/4001"
_PEER_EXAMPLE = f"{_EXAMPLE}/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
_PORTS = ("tcp",)
_FLAGS = ("p2p-circuit",)

MAX_REMEMBERED_CHARS = 128
"""A longer address is parsed each time and not cached: the cache has 16,384 entries, and strangers choose the
addresses. Usual addresses have at most 100 characters, relayed ones included."""

_ENDS = ((), ("p2p",), ("p2p", "p2p-circuit"), ("p2p", "p2p-circuit", "p2p"))
"""The parts that may follow the transport: none, the peer at the address, or its relay and perhaps the peer behind
it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddr:
    """A peer and its address. `addr` is without the final /p2p/<peer_id>."""

    peer_id: str
    addr: str

    def __str__(self) -> str:
        return f"{self.addr}/p2p/{self.peer_id}"


def parse_peer_addr(text: str) -> PeerAddr:
    """Parse an address that ends in /p2p/<peer id>. Raises ConfigError, which names the part that is wrong."""
    *host, (name, peer_id) = _parts(text, _PEER_EXAMPLE)
    if name != "p2p":
        what = "it does not end in /p2p/<peer id>, so the peer at the address could not be verified"
        raise _fault(text, what, _PEER_EXAMPLE)
    return PeerAddr(peer_id=peer_id, addr="".join(_text(part) for part in host))


def check_listen_addr(text: str) -> str:
    """Return `text` if a host can listen there. Raises ConfigError."""
    parts = _parts(text, _LISTEN_EXAMPLE)
    if any(name in ("p2p", "p2p-circuit") for name, _ in parts):
        raise _fault(text, "a listen address names no peer", _LISTEN_EXAMPLE)
    if parts[0][0].startswith("dns"):
        raise _fault(text, "a host listens on an IP address, not on a name", _LISTEN_EXAMPLE)
    return text


def check_announce_addr(text: str) -> str:
    """Return `text` if it can be announced to others. Raises ConfigError."""
    if any(name in _PORTS and value == "0" for name, value in _parts(text, _EXAMPLE)):
        raise _fault(text, "others cannot dial port 0; give the port at which they reach this node", _EXAMPLE)
    return text


def dialable(addrs: Iterable[str]) -> tuple[str, ...]:
    """Return those of `addrs` that a host can dial; they do not end in /p2p. A peer may have sent any text."""
    addrs = tuple(addrs)
    found = tuple(
        addr for addr in addrs if (_is_dialable_remembered if len(addr) <= MAX_REMEMBERED_CHARS else _is_dialable)(addr)
    )
    return addrs if len(found) == len(addrs) else found  # usually the same tuple, so that it is not kept twice


def is_loopback(addr: str) -> bool:
    """Return whether only this machine can use the address, in whatever notation. False for names."""
    ip = ip_of(addr)
    return ip is not None and kind_of(ip) == "loopback"


def is_private(addr: str) -> bool:
    """Return whether only this machine or its local network can use the address. False for names and invalid text."""
    ip = ip_of(addr)
    return ip is not None and kind_of(ip) in ("private", "link-local", "loopback")


def is_relayed(addr: str) -> bool:
    """Return whether the address leads through a relay."""
    return "/p2p-circuit" in addr


def relay_of(addr: str) -> str:
    """Return the peer id of the relay that an address leads through, or an empty text."""
    before, found, _ = addr.partition("/p2p-circuit")
    return before.rpartition("/p2p/")[2] if found else ""


def relay_addr_of(addr: str) -> str:
    """Return the relay's own address from an address that leads through it."""
    return addr.partition("/p2p/")[0]


@lru_cache(maxsize=4096)
def ip_of(addr: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address at the beginning of a multiaddr; None for names, invalid text and addresses with a zone."""
    _, version, host, *_ = (*addr.split("/", 3), "", "", "")
    try:
        return ipaddress.ip_address(host) if version in ("ip4", "ip6") and "%" not in addr else None
    except ValueError:
        return None


def tcp_endpoint(addr: str) -> tuple[str, int] | None:
    """Return the host and port of an address that is only a host and a TCP port; None for any other address."""
    try:
        parts = _split(addr)
    except ValueError:  # such as a WebSocket address, which a peer's daemon may know
        return None
    match parts:
        case [(_, host), ("tcp", port)]:
            return host, int(port)
    return None


def is_tcp_by_ip(addr: str) -> bool:
    """Return whether the address is only an IP address and a TCP port."""
    return ip_of(addr) is not None and tcp_endpoint(addr) is not None


def _is_dialable(addr: str) -> bool:
    try:
        return _split(addr)[-1][0] != "p2p"
    except ValueError:
        return False


_is_dialable_remembered = lru_cache(maxsize=2**14)(_is_dialable)


def _text(part: tuple[str, str]) -> str:
    return f"/{part[0]}/{part[1]}" if part[1] else f"/{part[0]}"


def _parts(text: str, example: str) -> list[tuple[str, str]]:
    try:
        return _split(text)
    except ValueError as fault:
        raise _fault(text, str(fault), example) from None


def _split(text: str) -> list[tuple[str, str]]:
    """Return the names and values of an address, which begins with a host and a port. Raises ValueError with the
    fault."""
    if len(text) > limits.MAX_ADDR_BYTES:
        raise ValueError("it is too long")
    if not text.startswith("/"):
        raise ValueError("it does not start with /")
    words = iter(text[1:].split("/"))
    parts = []
    for word in words:
        if word in _FLAGS:
            parts.append((word, ""))
        elif word in (*_HOSTS, *_PORTS, "p2p"):
            parts.append((word, _value(word, next(words, ""))))
        elif word == "udp":
            raise ValueError("QUIC (/udp) is not used; the peer's address with /tcp is")
        else:
            raise ValueError(f"{word!r} is not a known part")
    names = [name for name, _ in parts]
    if names[0] not in _HOSTS:
        raise ValueError(f"it starts with /{names[0]}, not with /ip4, /ip6 or /dns")
    if len(names) < 2 or names[1] not in _PORTS:
        raise ValueError("a port is missing: /tcp/<port> belongs after the host")
    if tuple(names[2:]) not in _ENDS:
        raise ValueError("only /p2p/<peer id>, or /p2p/<relay's id>/p2p-circuit, may follow the port")
    return parts


def _value(name: str, value: str) -> str:
    try:
        if name == "ip4":
            ipaddress.IPv4Address(value)
        elif name == "ip6":
            ipaddress.IPv6Address(value)
        elif name == "p2p":
            check_peer_id(value)
    except ValueError as error:
        raise ValueError(f"/{name}: {error}") from None
    if name in _PORTS and not (value.isascii() and value.isdigit() and int(value) <= 65535):
        raise ValueError(f"/{name}: {value!r} is not a port (0 to 65535)")
    if not value:
        raise ValueError(f"/{name} has no value")
    return value


def _fault(text: str, what: str, example: str) -> ConfigError:
    return ConfigError(f"address {text[:120]!r} is malformed: {what}", remedy=f"write it like {example}")


_number = partial(decode_varint, max_bytes=5)


@lru_cache(maxsize=4096)
def peer_id_bytes(peer_id: str) -> bytes:
    """Return the bytes of a peer id. Cached, since base58 is slow in pure Python and few peers occur often. Raises
    ValueError."""
    return base58_decode(peer_id)


@lru_cache(maxsize=4096)
def peer_id_text(raw: bytes) -> str:
    return base58_encode(raw)


def _port_bytes(value: str) -> bytes:
    try:
        return int(value).to_bytes(2, "big")
    except OverflowError:
        raise ValueError(f"{value} is not a port") from None


def _ip_text(raw: bytes) -> str:
    return str(ipaddress.ip_address(raw))


class _Part(NamedTuple):
    """A part of an address: its code in multiformats' table of protocols, the conversions of its value, and the number
    of bytes of a value that has always as many. Each other value follows its length. A flag has no value."""

    code: int
    to_bytes: Callable[[str], bytes] = str.encode
    to_text: Callable[[bytes], str] = bytes.decode
    num_bytes: int | None = None


_PARTS = {
    "ip4": _Part(4, lambda value: ipaddress.IPv4Address(value).packed, _ip_text, 4),
    "tcp": _Part(6, _port_bytes, lambda raw: str(int.from_bytes(raw, "big")), 2),
    "ip6": _Part(41, lambda value: ipaddress.IPv6Address(value).packed, _ip_text, 16),
    "ip6zone": _Part(42),
    "dns": _Part(53),
    "dns4": _Part(54),
    "dns6": _Part(55),
    "p2p-circuit": _Part(290),
    "unix": _Part(400, lambda path: f"/{path}".encode(), lambda raw: raw.decode().removeprefix("/")),
    "p2p": _Part(421, peer_id_bytes, peer_id_text),
}
_NAMES = {part.code: name for name, part in _PARTS.items()}


def addr_bytes(addr: str) -> bytes:
    """Encode an address. Raises ValueError if a part is unknown or has an invalid value."""
    words = iter(addr.split("/")[1:])
    encoded = b""
    for name in words:
        if (part := _PARTS.get(name)) is None:
            raise ValueError(f"{name!r} is not part of an address")
        encoded += encode_varint(part.code)
        if name in _FLAGS:
            continue
        value = "/".join(words) if name == "unix" else next(words, "")  # a path takes all that follows
        if not value:
            raise ValueError(f"/{name} has no value")
        raw = part.to_bytes(value)
        encoded += raw if part.num_bytes else encode_varint(len(raw)) + raw
    return encoded


@lru_cache(maxsize=4096)
def addr_text(raw: bytes) -> str:
    """Decode an address. Cached, since the daemon lists all connections again and again. Raises ValueError if a part is
    unknown or cut off."""
    text, at = "", 0
    while at < len(raw):
        code, at = _number(raw, at)
        name = _NAMES.get(code)
        if name is None:
            raise ValueError(f"an address has a part of unknown code {code}")
        text += f"/{name}"
        if name in _FLAGS:
            continue
        part = _PARTS[name]
        length, at = (part.num_bytes, at) if part.num_bytes else _number(raw, at)
        if at + length > len(raw):
            raise ValueError("an address ends early")
        text += f"/{part.to_text(raw[at : at + length])}"
        at += length
    return text
