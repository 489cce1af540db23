"""The binary forms of peer ids and multiaddrs, which the libp2p daemon speaks. Pure.

A multiaddr is a sequence of parts, each a code as a varint and then its value, of a fixed length or behind its own
(multiformats specs, multiaddr and its table of protocols). Known are the parts that go-libp2p hosts have addresses of.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from swarm_protocol import base58
from swarm_protocol.varint import decode_varint, encode_varint

_number = partial(decode_varint, max_bytes=5)


@lru_cache(maxsize=4096)
def peer_id_bytes(peer_id: str) -> bytes:
    """base58 is slow in pure Python and the same few peers come again and again. Raises ValueError."""
    return base58.decode(peer_id)


@lru_cache(maxsize=4096)
def peer_id_text(raw: bytes) -> str:
    return base58.encode(raw)


def addr_bytes(addr: str) -> bytes:
    """Raises ValueError if a part is unknown, or has another value than it takes."""
    words = iter(addr.split("/")[1:])
    encoded = b""
    for name in words:
        part = _BY_NAME.get(name)
        if part is None:
            raise ValueError(f"{name!r} is no part of an address")
        encoded += encode_varint(part.code)
        if part.num_bytes == 0:
            continue
        value = "/".join(words) if name == "unix" else next(words, "")  # a path is all that follows
        if not value:
            raise ValueError(f"/{name} has no value")
        raw = part.to_bytes(value)
        encoded += raw if part.num_bytes else encode_varint(len(raw)) + raw
    return encoded


def addr_text(raw: bytes) -> str:
    """Raises ValueError if a part is unknown, or is cut off."""
    text, at = "", 0
    while at < len(raw):
        code, at = _number(raw, at)
        part = _BY_CODE.get(code)
        if part is None:
            raise ValueError(f"an address has a part of unknown code {code}")
        length, at = _number(raw, at) if part.num_bytes is None else (part.num_bytes, at)
        if at + length > len(raw):
            raise ValueError("an address ends early")
        text += f"/{part.name}"
        if part.num_bytes != 0:
            text += f"/{part.to_text(raw[at : at + length])}"
        at += length
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """`num_bytes` of the value: None where it is said each time, 0 where there is no value."""

    name: str
    code: int
    num_bytes: int | None
    to_bytes: Callable[[str], bytes]
    to_text: Callable[[bytes], str]


def _flag(name: str, code: int) -> _Part:
    return _Part(name=name, code=code, num_bytes=0, to_bytes=lambda _: b"", to_text=lambda _: "")


def _text(name: str, code: int) -> _Part:
    return _Part(name=name, code=code, num_bytes=None, to_bytes=str.encode, to_text=bytes.decode)


def _port(name: str, code: int) -> _Part:
    return _Part(
        name=name, code=code, num_bytes=2, to_bytes=_port_bytes, to_text=lambda raw: str(int.from_bytes(raw, "big"))
    )


def _port_bytes(port: str) -> bytes:
    try:
        return int(port).to_bytes(2, "big")
    except OverflowError:
        raise ValueError(f"{port} is not a port") from None


def _unpadded(text: str) -> bytes:
    """What follows "u" in multibase: base64 for URLs, without padding."""
    return base64.urlsafe_b64decode(text[1:] + "=" * (-(len(text) - 1) % 4))


_PARTS = (
    _Part(
        name="ip4",
        code=4,
        num_bytes=4,
        to_bytes=lambda text: ipaddress.IPv4Address(text).packed,
        to_text=lambda raw: str(ipaddress.IPv4Address(raw)),
    ),
    _Part(
        name="ip6",
        code=41,
        num_bytes=16,
        to_bytes=lambda text: ipaddress.IPv6Address(text).packed,
        to_text=lambda raw: str(ipaddress.IPv6Address(raw)),
    ),
    _text("ip6zone", 42),
    _text("dns", 53),
    _text("dns4", 54),
    _text("dns6", 55),
    _port("tcp", 6),
    _port("udp", 273),
    _flag("quic", 460),
    _flag("quic-v1", 461),
    _flag("ws", 477),
    _flag("wss", 478),
    _flag("webtransport", 465),
    _Part(
        name="certhash",
        code=466,
        num_bytes=None,
        to_bytes=_unpadded,
        to_text=lambda raw: "u" + base64.urlsafe_b64encode(raw).decode().rstrip("="),
    ),
    _Part(name="p2p", code=421, num_bytes=None, to_bytes=peer_id_bytes, to_text=peer_id_text),
    _flag("p2p-circuit", 290),
    _Part(
        name="unix",
        code=400,
        num_bytes=None,
        to_bytes=lambda path: b"/" + path.encode(),
        to_text=lambda raw: raw.decode().removeprefix("/"),
    ),
)
_BY_NAME = {part.name: part for part in _PARTS}
_BY_CODE = {part.code: part for part in _PARTS}
