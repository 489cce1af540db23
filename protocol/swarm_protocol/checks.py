"""Checks single values from a peer: text, names, addresses, numbers, digests.

Each check raises ValueError with the field's name and returns the value, typed. A dataclass that is `Checked` names the
checks in the annotations of its fields; `wire.decode` turns the ValueError into PeerViolation. Peer ids are checked by
`identity.check_peer_id`, bounds are in `limits`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from inspect import get_annotations
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from swarm_protocol import limits

Check: TypeAlias = Callable[[Any, str], object]
"""A check: it gets a value and the name of its field."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@+-]*(/[A-Za-z0-9_][A-Za-z0-9._:@+-]*)*")
_ADDR = re.compile(r"(/[A-Za-z0-9._:%-]+)+")
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\xa0\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u1680\u17b4\u17b5"
    r"\u180b-\u180f\u2000-\u200f\u2028-\u202f\u205f-\u206f\u2800\u3000\u3164\ud800-\uf8ff\ufe00-\ufe0d\ufeff\uffa0"
    r"\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    r"\U000e0000-\U000e0fff\U000f0000-\U0010ffff]"
)
"""Control and format characters, separators other than the space, surrogates, characters for private use, and letters
and marks that show nothing, except for the two marks that emoji need. The list is fixed, because `str.isprintable`
depends on the Unicode version of the Python: nodes with different Pythons would disagree on a name with a new emoji."""


def check_text(value: object, field: str, *, max_chars: int, empty: bool = True) -> str:
    """Check that `value` is one line that is safe on a terminal and in a log: it has no control characters, line
    breaks, bidirectional overrides or other invisible format characters, and no lone surrogates."""
    if not isinstance(value, str) or not (value.isprintable() if value.isascii() else not _UNPRINTABLE.search(value)):
        raise ValueError(f"{field} is not one line of printable text")
    if len(value) > max_chars:
        raise ValueError(f"{field} has {len(value)} characters, more than {max_chars}")
    if not (value or empty):
        raise ValueError(f"{field} is empty")
    return value


def check_name(value: object, field: str, *, max_bytes: int = limits.MAX_NAME_BYTES) -> str:
    """Check a name that machines use: of a model, a run, a network, a purpose. ASCII, and safe as a relative path.

    Segments of letters, digits and `._:@+-`, joined by single slashes; none starts with a dot, so there is no `..`.
    """
    name = check_text(value, field, max_chars=max_bytes, empty=False)
    if not _NAME.fullmatch(name):
        raise ValueError(f"{field} {name!r} is not a name: letters, digits and ._:@+-, segments joined by /")
    return name


def check_addr(value: object, field: str) -> str:
    """Check the outer shape of a multiaddr, `/ip4/…`. Only the network can tell whether it can be dialled."""
    addr = check_text(value, field, max_chars=limits.MAX_ADDR_BYTES, empty=False)
    if not _ADDR.fullmatch(addr):
        raise ValueError(f"{field} {addr!r} is not a multiaddr")
    return addr


def check_choice(value: object, field: str, choices: Collection[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{field} is none of {', '.join(sorted(choices))}")
    return value


def check_int(value: object, field: str, *, low: int = 0, high: int) -> int:
    """Check an int in `[low, high]`; a bool is refused."""
    if not (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
        raise ValueError(f"{field} is {value!r:.40}, not a whole number in [{low}, {high}]")
    return value


def check_float(value: object, field: str, *, low: float = 0.0, high: float) -> float:
    """Check a number in `[low, high]`, both finite: NaN is in no range."""
    if not (isinstance(value, int | float) and low <= value <= high):
        raise ValueError(f"{field} is {value!r:.40}, not a number in [{low}, {high}]")
    return value


def check_digest(value: object, field: str, *, empty: bool = False) -> bytes:
    """Check a sha256 digest; with `empty` it may have no bytes at all."""
    if not (isinstance(value, bytes) and (len(value) == limits.DIGEST_BYTES or (empty and not value))):
        raise ValueError(f"{field} is not {limits.DIGEST_BYTES} bytes")
    return value


def check_count(values: object, field: str, *, max_items: int) -> None:
    """Check a tuple of distinct, hashable items, at most `max_items`."""
    if not (isinstance(values, tuple) and len(values) <= max_items):
        raise ValueError(f"{field} is not a tuple of at most {max_items} items")
    if len(values) > 1 and len(set(values)) != len(values):
        raise ValueError(f"{field} names something twice")


# for annotations, as in `Annotated[int, whole(9)]`; a value that fails is checked again by the function above that says
# why


def are_sorted(values: Sequence[Any]) -> bool:
    """Return whether `values` are sorted and distinct, the only order in which a set of values may be signed."""
    return list(values) == sorted(set(values))


def whole(high: int, low: int = 0) -> Check:
    """Return the check of a whole number in `[low, high]`."""

    def check(value: Any, field: str) -> None:
        if type(value) is not int or not low <= value <= high:
            check_int(value, field, low=low, high=high)

    return check


def number(high: float, low: float = 0.0) -> Check:
    """Return the check of a number in `[low, high]`."""

    def check(value: Any, field: str) -> None:
        if type(value) is not float or not low <= value <= high:
            check_float(value, field, low=low, high=high)

    return check


def one_of(choices: Collection[str]) -> Check:
    """Return the check of one of these texts."""
    return partial(check_choice, choices=frozenset(choices))


def sized(num_bytes: int) -> Check:
    """Return the check of exactly `num_bytes`."""

    def check(value: Any, field: str) -> None:
        if type(value) is not bytes or len(value) != num_bytes:
            raise ValueError(f"{field} is not {num_bytes} bytes")

    return check


def filled(max_bytes: int) -> Check:
    """Return the check of 1 to `max_bytes`."""

    def check(value: Any, field: str) -> None:
        if not (isinstance(value, bytes) and 0 < len(value) <= max_bytes):
            raise ValueError(f"{field} is not 1 to {max_bytes} bytes")

    return check


def one_line(max_chars: int, *, empty: bool = True) -> Check:
    """Return the check of one line of printable text."""
    return partial(check_text, max_chars=max_chars, empty=empty)


def named(max_bytes: int) -> Check:
    """Return the check of a name that machines use."""
    return partial(check_name, max_bytes=max_bytes)


def distinct(max_items: int) -> Check:
    """Return the check of a tuple of at most `max_items`, no two of them equal."""
    return partial(check_count, max_items=max_items)


def up_to(max_items: int) -> Check:
    """Return the check of at most `max_items`, which may be equal."""
    return partial(check_num_items, max_items=max_items)


def check_num_items(values: Any, field: str, *, max_items: int) -> Any:
    if len(values) > max_items:
        raise ValueError(f"{field} has {len(values)} items, more than {max_items}")
    return values


def max_items_of(hint: Any) -> int | None:
    """Return the maximum number of items that the checks of an annotation allow, or None if they have no bound."""
    bounds = [each.keywords.get("max_items") for each in getattr(hint, "__metadata__", ()) if isinstance(each, partial)]
    return min((most for most in bounds if most is not None), default=None)


Name: TypeAlias = Annotated[str, check_name]
Addr: TypeAlias = Annotated[str, check_addr]
Digest: TypeAlias = Annotated[bytes, check_digest]


def made_function(name: str, parameters: str, lines: Sequence[str], names: Mapping[str, Any]) -> Any:
    """Compile a function, as dataclasses make theirs. Its lines come from the fields of our own classes, never from a
    peer's text."""
    namespace = dict(names)
    exec("\n    ".join([f"def {name}({parameters}):", *(lines or ["pass"])]), namespace)  # noqa: S102
    return namespace[name]


_unchecked_types: ContextVar[frozenset[type[Checked]]] = ContextVar("unchecked types", default=frozenset())


@contextmanager
def unchecked(value_types: Iterable[type[Checked]]) -> Iterator[None]:
    """Skip the checks of the fields of these types inside this context and the tasks that begin in it. For simulations,
    whose nodes read nothing from outside."""
    token = _unchecked_types.set(_unchecked_types.get().union(value_types))
    try:
        yield
    finally:
        _unchecked_types.reset(token)


class Checked:
    """Base class of a frozen dataclass that checks each field as its annotation says. Raises ValueError.

    `Annotated[int, whole(9)]` is a checked field, a tuple's items are checked one by one, a Literal has one of its
    values, and None is not checked where the annotation allows it. A class that checks several fields together has its
    own `__post_init__`, which runs after these checks.
    """

    __slots__ = ()
    __post_init__: Callable[[Any], None]

    def __init_subclass__(cls) -> None:
        value_type: Any = cls
        bases = cls.__mro__[1:]
        assert not any(hasattr(base, "__dataclass_fields__") for base in bases), "checks of a base are not inherited"
        own = cls.__dict__.get("__post_init__")
        if getattr(own, "__name__", "") != "_check_fields":  # slots make a class twice
            checks = {field: check for field, hint in hints_of(value_type).items() if (check := _check_of(hint))}
            lines = [f"check_{field}(self.{field}, {field!r})" for field in checks]
            names: dict[str, Any] = {f"check_{field}": check for field, check in checks.items()}
            names |= {"own": own, "unchecked_types": _unchecked_types.get}
            lines += ["own(self)"] if own else []
            if lines:
                lines.insert(0, "if type(self) in unchecked_types(): return")
            cls.__post_init__ = made_function("_check_fields", "self", lines, names)


@cache
def hints_of(value_type: Any) -> dict[str, Any]:
    """Return the annotations of a class's own fields, resolved only by the names of its module."""
    return get_annotations(value_type, locals={}, eval_str=True)


def _check_of(hint: Any) -> Check | None:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return one_of(inner)
    if origin is Annotated:
        checks = [check for check in (*hint.__metadata__, _check_of(inner[0])) if check is not None]
        return checks[0] if len(checks) == 1 else partial(_check_all, checks=checks)
    if origin in (Union, UnionType) and inner[1:] == (type(None),) and (check := _check_of(inner[0])):
        return partial(_check_known, check=check)
    if origin is tuple and inner[1:] == (Ellipsis,) and (check := _check_of(inner[0])):
        return partial(_check_items, check=check)
    return None


def _check_all(value: Any, field: str, *, checks: Collection[Check]) -> None:
    for check in checks:
        check(value, field)


def _check_known(value: Any, field: str, *, check: Check) -> None:
    if value is not None:
        check(value, field)


def _check_items(values: Collection[Any], field: str, *, check: Check) -> None:
    for value in values:
        check(value, field)


def shared_fields(source: Any, target: type[Any]) -> dict[str, Any]:
    """Return the values of the fields that `source` and the dataclass `target` share, to make a `target` from
    `source`."""
    names = source.__dataclass_fields__.keys() & target.__dataclass_fields__.keys()
    return {name: getattr(source, name) for name in names}
