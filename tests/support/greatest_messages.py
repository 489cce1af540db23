"""The greatest valid message of each kind, built from the checks in its fields' annotations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, partial
from inspect import getclosurevars
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from swarm_protocol import limits
from swarm_protocol.checks import check_addr, check_digest, check_name, hints_of
from swarm_protocol.dht_messages import check_addrs
from swarm_protocol.identity import Identity, check_peer_id
from swarm_protocol.manifest_messages import check_file_name
from swarm_protocol.version import check_network_id

Changes = Mapping[tuple[str, str], Callable[[], Any]]
"""Values of fields that more than their own annotation bounds, by class and field."""

WIDE = "\U0001f600"
"""A printable character of four bytes, the most that one takes."""


@cache
def peer_ids(count: int) -> tuple[str, ...]:
    return tuple(sorted(Identity(number.to_bytes(32, "big")).peer_id for number in range(1, count + 1)))


def longest_addrs() -> tuple[str, ...]:
    """Return as many of the longest addresses as a node may be named by."""
    return tuple(f"/{number:0{limits.MAX_ADDR_BYTES - 1}}" for number in range(limits.MAX_CONTACT_ADDRS))


class Builder:
    """Builds the greatest values of classes whose fields are checked (`checks.Checked`)."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self.used: set[tuple[str, str]] = set()
        self.unbounded: set[tuple[str, str]] = set()

    def message(self, cls: Any, number: int = 0) -> Any:
        """Return the greatest value of `cls`; those of different numbers differ where they can."""
        values = {}
        for each in fields(cls):
            key = (cls.__name__, each.name)
            if key in self._changes:
                self.used.add(key)
                values[each.name] = self._changes[key]()
            else:
                values[each.name] = self._of(hints_of(cls)[each.name], key, number)
        return cls(**values)

    def _of(self, hint: Any, key: tuple[str, str], number: int) -> Any:
        origin, inner = get_origin(hint), get_args(hint)
        if origin is Literal:
            return max(inner, key=len)
        if origin is Annotated:
            return self._checked(inner[0], hint.__metadata__, key, number)
        if origin in (Union, UnionType):
            return self._of(inner[0], key, number)
        if origin is tuple and inner[1:] == (Ellipsis,):
            self.unbounded.add(key)
            return ()
        if hint is bool:
            return True
        if hint in (bytes, str, int, float) or origin is not None:
            self.unbounded.add(key)
            return {bytes: b"", str: "", int: 0, float: 0.0}.get(hint, {})
        return self.message(hint, number)

    def _checked(self, hint: Any, checks: tuple[Any, ...], key: tuple[str, str], number: int) -> Any:
        (check,) = checks
        if check is check_addrs:
            return longest_addrs()
        bound = _bound(check)
        if get_origin(hint) is tuple:
            return tuple(self._of(get_args(hint)[0], key, place) for place in range(bound))
        if get_origin(hint) in (Annotated, Union, UnionType):  # nested checks: the innermost bounds the value
            return self._of(hint, key, number)
        if check is check_peer_id:
            return peer_ids(1024)[number]
        if bound is None:
            self.unbounded.add(key)
            bound = 0
        if hint is bytes:
            return number.to_bytes(8, "big")[-bound:].rjust(bound, b"\xff") if bound else b""
        if hint is str:
            return _text(check, bound, number)
        return float(bound) if hint is float else bound - number


def _bound(check: Any) -> Any:
    """Return the largest size or number that `check` accepts, or None if it does not say."""
    if check in (check_name, check_file_name):
        return limits.MAX_NAME_BYTES
    if check is check_network_id:
        return limits.MAX_NETWORK_ID_BYTES
    if check is check_addr:
        return limits.MAX_ADDR_BYTES
    if check is check_digest or (isinstance(check, partial) and check.func is check_digest):
        return limits.DIGEST_BYTES
    if isinstance(check, partial):
        if "choices" in check.keywords:
            return max(check.keywords["choices"], key=len)
        return next(value for name, value in check.keywords.items() if name.startswith("max_"))
    known = getclosurevars(check).nonlocals
    return next((known[name] for name in ("high", "num_bytes", "max_bytes", "max_items") if name in known), None)


def _text(check: Any, bound: Any, number: int) -> str:
    if isinstance(bound, str):
        return bound
    if check is check_addr:
        return f"/{number:0{bound - 1}}"
    names = (check_name, check_file_name, check_network_id)
    is_name = check in names or (isinstance(check, partial) and check.func is check_name)
    return f"{number:0{bound}}" if is_name else str(number) + WIDE * (bound - len(str(number)))
