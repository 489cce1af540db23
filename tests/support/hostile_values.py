"""Messages that are well-formed and not what was meant: a hostile peer chose some of their fields."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from swarm_protocol.wire import WireMessage

T = TypeVar("T")

INTS = (0, 1, 2, 3, 255, 256, 2**19, 2**20, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**64 - 1, -1)
FLOATS = (0.0, -0.0, -1.0, 1e-300, 0.5, 1e9, 1e300, math.inf, -math.inf, math.nan)
TEXTS = ("", "x", "é" * 400, "😀" * 1000, "a\nb", "\x00", "x" * 1000, "\u202e")


def altered(message: T, chance: random.Random, *, texts: Sequence[str] = (), num_changes: int = 1) -> T:
    """Return `message` with `num_changes` fields of it, or of messages in it, replaced; without those that its class
    refuses or that cannot be encoded. `texts` are peers and names that may stand for each other."""
    for _ in range(num_changes):
        with suppress(ValueError, TypeError, AttributeError, OverflowError):
            changed = _with_change(message, chance, (*texts, *TEXTS))
            if isinstance(changed, WireMessage):
                changed.to_bytes()
            message = changed
    return message


def _with_change(message: T, chance: random.Random, texts: Sequence[str]) -> T:
    field = chance.choice(fields(message))  # type: ignore[arg-type]
    changed = _other(getattr(message, field.name), chance, texts)
    return replace(message, **{field.name: changed})  # type: ignore[type-var]


def _other(value: Any, chance: random.Random, texts: Sequence[str]) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return chance.choice((value + 1, max(0, value - 1), chance.choice(INTS)))
        case float():
            return chance.choice((-value, value + 1.0, chance.choice(FLOATS)))
        case str():
            return chance.choice(texts)
        case bytes() | memoryview():
            return _other_bytes(bytes(value), chance)
        case tuple():
            return _other_items(value, chance, texts)
        case _ if is_dataclass(value):
            return None if chance.random() < 0.1 else _with_change(value, chance, texts)
    return chance.choice((0, 1.0, "x", bytes(32), ()))


def _other_bytes(value: bytes, chance: random.Random) -> bytes:
    if not value or chance.random() < 0.2:
        return chance.randbytes(chance.choice((0, 1, 16, 32, 64)))
    at = chance.randrange(len(value))
    return value[:at] + bytes([value[at] ^ 1 << chance.randrange(8)]) + value[at + 1 :]


def _other_items(items: tuple[Any, ...], chance: random.Random, texts: Sequence[str]) -> tuple[Any, ...]:
    if not items:
        return (chance.choice(texts),)
    at = chance.randrange(len(items))
    match chance.randrange(5):
        case 0:
            return items[:at] + items[at + 1 :]
        case 1:
            return (*items, items[at])
        case 2:
            return items[::-1]
        case 3:
            return ()
    return (*items[:at], _other(items[at], chance, texts), *items[at + 1 :])
