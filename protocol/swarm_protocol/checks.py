"""Checks of single values from a peer: text, names, addresses, numbers, digests.

Each check raises ValueError with the field's name and returns the value, typed. Dataclasses call them in
`__post_init__`; `wire.decode` turns the ValueError into PeerViolation. Peer ids are checked by
`identity.check_peer_id`, bounds are in `limits`.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from swarm_protocol import limits

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@+-]*(/[A-Za-z0-9_][A-Za-z0-9._:@+-]*)*")
_ADDR = re.compile(r"(/[A-Za-z0-9._:%-]+)+")


def check_text(value: object, field: str, *, max_chars: int, empty: bool = True) -> str:
    """One line that is safe on a terminal and in a log.

    `str.isprintable` refuses control characters, line breaks, bidirectional overrides and other invisible format
    characters, lone surrogates, and unassigned code points.
    """
    if not (isinstance(value, str) and value.isprintable()):
        raise ValueError(f"{field} is not one line of printable text")
    if len(value) > max_chars:
        raise ValueError(f"{field} has {len(value)} characters, more than {max_chars}")
    if not (value or empty):
        raise ValueError(f"{field} is empty")
    return value


def check_name(value: object, field: str, *, max_bytes: int = limits.MAX_NAME_BYTES) -> str:
    """A name that machines use: of a model, a run, a network, a purpose. ASCII, and safe as a relative path.

    Segments of letters, digits and `._:@+-`, joined by single slashes; none starts with a dot, so there is no `..`.
    """
    name = check_text(value, field, max_chars=max_bytes, empty=False)
    if not _NAME.fullmatch(name):
        raise ValueError(f"{field} {name!r} is not a name: letters, digits and ._:@+-, segments joined by /")
    return name


def check_addr(value: object, field: str) -> str:
    """The outer shape of a multiaddr, `/ip4/…`; whether it can be dialled is for the network to say."""
    addr = check_text(value, field, max_chars=limits.MAX_ADDR_BYTES, empty=False)
    if not _ADDR.fullmatch(addr):
        raise ValueError(f"{field} {addr!r} is not a multiaddr")
    return addr


def check_choice(value: object, field: str, choices: Collection[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{field} is none of {', '.join(sorted(choices))}")
    return value


def check_int(value: object, field: str, *, low: int = 0, high: int) -> int:
    """An int in `[low, high]`; a bool is none."""
    if not (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
        raise ValueError(f"{field} is {value!r:.40}, not a whole number in [{low}, {high}]")
    return value


def check_float(value: object, field: str, *, low: float = 0.0, high: float) -> float:
    """A number in `[low, high]`, both finite: NaN is in no range."""
    if not (isinstance(value, int | float) and low <= value <= high):
        raise ValueError(f"{field} is {value!r:.40}, not a number in [{low}, {high}]")
    return value


def check_digest(value: object, field: str, *, empty: bool = False) -> bytes:
    """A sha256 digest, or with `empty` also no bytes at all."""
    if not (isinstance(value, bytes) and (len(value) == limits.DIGEST_BYTES or (empty and not value))):
        raise ValueError(f"{field} is not {limits.DIGEST_BYTES} bytes")
    return value


def check_count(values: object, field: str, *, max_items: int) -> None:
    """A tuple of distinct, hashable items, at most `max_items`."""
    if not (isinstance(values, tuple) and len(values) <= max_items):
        raise ValueError(f"{field} is not a tuple of at most {max_items} items")
    if len(set(values)) != len(values):
        raise ValueError(f"{field} names something twice")
