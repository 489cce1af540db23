"""Defines how a table of settings is declared and checked. Values only.

A table is a frozen dataclass. Each field is declared with its default, its limits and its explanation, by `whole`,
`number`, `choice` or `setting`. `check_fields` applies the limits. It collects all problems of a table, so that the
author of a run reads all of them at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from swarm_protocol.errors import ConfigError, first_few
from swarm_protocol.identity import check_peer_id
from swarm_protocol.toml_text import toml_value

MAX_ADMITTED = 1024
"""Peer ids that a run may admit: several full groups, within a run file's size."""
MAX_NAMED_KEYS = 8
"""Maximum unknown keys that a message names."""
_UNSET = object()


class UnknownKey(ConfigError):
    """A run has a key that this version does not know."""


class ImpossibleRun(ConfigError):
    """`problems` are the impossible values of a run, each with its remedy."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(f"the run's settings do not work: {'; '.join(problems)}", remedy="correct the run file")
        self.problems = tuple(problems)


class ImpossibleValues(ValueError):
    """`problems` are the impossible values of one table."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class SettingChecks:
    """Collects the problems of `table`, which is called `name` in a run. `finish` raises them together."""

    def __init__(self, table: object, name: str) -> None:
        self._table = table
        self._prefix = f"{name}." if name else ""
        self._problems: list[str] = []
        self._wrong: set[str] = set()

    def require(self, key: str, fits: bool, remedy: str) -> None:
        if not fits:
            self.refuse(key, f"{self._prefix}{key} = {toml_value(getattr(self._table, key))[:80]}: {remedy}")

    def refuse(self, key: str, problem: str) -> None:
        self._wrong.add(key)
        self._problems.append(problem)

    def passed(self, *keys: str) -> bool:
        """Return whether no problem of `keys` was found, so that their values can be compared."""
        return self._wrong.isdisjoint(keys)

    def finish(self) -> None:
        """Raises ImpossibleValues if there are problems."""
        if self._problems:
            raise ImpossibleValues(self._problems)


@dataclass(frozen=True, slots=True)
class _Rule:
    fits: Callable[[Any], bool]
    remedy: str


def describe(about: str, fits: Callable[[Any], bool] | None = None, remedy: str = "") -> dict[str, Any]:
    """Return the metadata of a field that `dataclasses.field` declares. See `setting`."""
    return {"about": about, "rule": _Rule(fits, remedy) if fits else None}


def setting(
    default: Any, about: str, fits: Callable[[Any], bool] | None = None, remedy: str = "", *, implied: Any = _UNSET
) -> Any:
    """Declare a field with its explanation. Values that do not fit are refused with `remedy`.

    `implied` marks a setting that was added after runs had been signed: it is the value that a signed file without the
    setting means. A run with that value keeps the id that it had before the setting existed, so `implied` never
    changes.
    """
    later = {} if implied is _UNSET else {"implied": implied}
    return field(default=default, metadata={**describe(about, fits, remedy), **later})


def whole(default: int, limits: tuple[int, int], about: str, *, implied: Any = _UNSET) -> Any:
    """Declare a whole number within `limits`, which are allowed."""
    low, high = limits
    return setting(
        default,
        about,
        lambda value: type(value) is int and low <= value <= high,
        f"use a whole number from {low} to {high}",
        implied=implied,
    )


def number(default: float, limits: tuple[float, float], about: str, *, implied: Any = _UNSET) -> Any:
    """Declare a number within `limits`, which are allowed."""
    low, high = limits
    return setting(
        default,
        about,
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high,
        f"use a number from {low:g} to {high:g}",
        implied=implied,
    )


def choice(default: str, options: Sequence[str], about: str, *, implied: Any = _UNSET) -> Any:
    """Declare a setting that is one of `options`."""
    remedy = f"use {' or '.join(options)}" if len(options) == 2 else f"use one of {', '.join(options)}"
    return setting(default, about, lambda value: value in options, remedy, implied=implied)


def flag(default: bool, about: str, *, implied: Any = _UNSET) -> Any:
    """Declare a setting that is true or false."""
    return setting(default, about, lambda value: isinstance(value, bool), "use true or false", implied=implied)


def free_table(name: str, default: Mapping[str, Any], about: str) -> Any:
    """Declare the table `name`, which may have any keys."""
    remedy = f"write its keys below a line [{name}]"
    return field(
        default_factory=lambda: default, metadata=describe(about, lambda value: isinstance(value, Mapping), remedy)
    )


def check_fields(table: Any, name: str) -> SettingChecks:
    """Check each value of `table`, called `name` in messages, by itself. The caller checks combinations of values."""
    checks = SettingChecks(table, name)
    for each in fields(table):
        if (rule := each.metadata["rule"]) is not None:
            checks.require(each.name, rule.fits(getattr(table, each.name)), rule.remedy)
    return checks


def declared(table: type[Any], key: str, prefix: str = "") -> dict[str, Any]:
    """Return the "about" or "implied" of each setting of `table` that has one, by its name after `prefix`."""
    return {f"{prefix}{each.name}": each.metadata[key] for each in fields(table) if key in each.metadata}


def are_peers(value: object) -> bool:
    """Return whether a value is a list of distinct peer ids."""
    if not isinstance(value, list | tuple) or len(value) > MAX_ADMITTED:
        return False
    try:
        for each in value:
            check_peer_id(each)
    except ValueError:
        return False
    return len(set(value)) == len(value)


def matching(pattern: str) -> Callable[[object], bool]:
    """Return a check whether a value is text that matches the whole of `pattern`."""
    whole = re.compile(pattern, re.ASCII)
    return lambda value: isinstance(value, str) and whole.fullmatch(value) is not None


is_hub_id = matching(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
"""Return whether a value is OWNER/NAME."""
is_revision = matching(r"\w[\w.-]{0,95}(?:/\w[\w.-]{0,95})?")
"""Return whether a value can be a branch, a tag or a commit of a repository on a hub."""
is_commit = matching(r"[0-9a-f]{40}")
is_digest = matching(r"[0-9a-f]{64}")


def refuse_unknown_keys(mapping: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises UnknownKey, which names the keys that are not `known`."""
    unknown = [str(key)[:80] for key in mapping if key not in known]
    if not unknown:
        return
    close = [match for key in unknown[:MAX_NAMED_KEYS] for match in difflib.get_close_matches(key, known, n=1)]
    what, it = ("an unknown key", "it") if len(unknown) == 1 else ("unknown keys:", "them")
    remedy = f"did you mean {', '.join(map(repr, close))}?" if close else f"remove {it}, or look up what you mean"
    raise UnknownKey(f"{where} has {what} {first_few(unknown, MAX_NAMED_KEYS, repr)}", remedy=remedy)


def table_of(kind: type[Any], key: str, mapping: object) -> Any:
    """Make the dataclass `kind` from `mapping`, the file's table `key`. Raises ConfigError, and what `kind` raises."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{key} must be a table", remedy=f"write its keys below a line [{key}]")
    refuse_unknown_keys(mapping, {each.name for each in fields(kind)}, f"[{key}]")
    return kind(**with_floats(kind, mapping))


def with_floats(kind: type[Any], mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return `mapping` with whole numbers as floats where `kind` has floats, so that equal runs have equal bytes."""
    fractional = {each.name for each in fields(kind) if each.type == "float"}
    return {
        key: float(value) if key in fractional and type(value) is int and abs(value) < 1 << 53 else value
        for key, value in mapping.items()
    }
