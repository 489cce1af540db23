"""Collects what is wrong with the settings of a run, so that its author hears all of it at once. Values only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import check_peer_id

MAX_ADMITTED = 1024
"""Several full groups, within a run file's size."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"\w[\w.-]{0,95}(?:/\w[\w.-]{0,95})?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ImpossibleRun(ConfigError):
    """`problems` are the impossible values of a run, each with what to use instead."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(f"the run cannot be: {'; '.join(problems)}", remedy="correct the run file")
        self.problems = tuple(problems)


class ImpossibleValues(ValueError):
    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class SettingChecks:
    """Collects what is wrong with one table, so that its author hears it all at once."""

    def __init__(self, table: str) -> None:
        self._prefix = f"{table}." if table else ""
        self._problems: list[str] = []
        self._wrong: set[str] = set()

    def require(self, fits: bool, key: str, value: object, remedy: str) -> None:
        if not fits:
            self.refuse(key, f"{self._prefix}{key} = {repr(value)[:80]}: {remedy}")

    def refuse(self, key: str, problem: str) -> None:
        self._wrong.add(key)
        self._problems.append(problem)

    def passed(self, *keys: str) -> bool:
        """Whether none of `keys` has been found wrong: they can be compared with each other."""
        return self._wrong.isdisjoint(keys)

    def whole(self, key: str, value: object, low: int, high: int) -> None:
        fits = type(value) is int and low <= value <= high
        self.require(fits, key, value, f"use a whole number from {low} to {high}")

    def number(self, key: str, value: object, low: float, high: float) -> None:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        self.require(fits, key, value, f"use a number from {low:g} to {high:g}")

    def finish(self) -> None:
        if self._problems:
            raise ImpossibleValues(self._problems)


def are_peers(value: object) -> bool:
    """Whether it is a list of distinct peer ids."""
    if not isinstance(value, list | tuple) or len(value) > MAX_ADMITTED:
        return False
    try:
        for each in value:
            check_peer_id(each)
    except ValueError:
        return False
    return len(set(value)) == len(value)


def is_hub_id(value: object) -> bool:
    """Whether it is OWNER/NAME."""
    return isinstance(value, str) and _HUB_ID.fullmatch(value) is not None


def is_revision(value: object) -> bool:
    """Whether it can be a branch, a tag or a commit of a repository on a hub."""
    return isinstance(value, str) and _REVISION.fullmatch(value) is not None


def is_commit(value: str) -> bool:
    return _COMMIT.fullmatch(value) is not None


def is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def refuse_unknown_keys(mapping: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises ConfigError for the first key that is not `known`."""
    for key in mapping:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else "remove it, or look up the setting you mean"
            raise ConfigError(f"{where} has an unknown key {str(key)[:80]!r}", remedy=remedy)


def table_of(kind: type[Any], key: str, mapping: object) -> Any:
    """`mapping` as the dataclass `kind`, which is table `key`. Raises ConfigError, and what the dataclass raises."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{key} must be a table", remedy=f"write its keys below a line [{key}]")
    refuse_unknown_keys(mapping, {each.name for each in fields(kind)}, f"[{key}]")
    return kind(**with_floats(kind, mapping))


def with_floats(kind: type[Any], mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Whole numbers given for fractional settings become floats, so that equal runs have equal bytes."""
    fractional = {each.name for each in fields(kind) if each.type == "float"}
    return {
        key: float(value) if key in fractional and type(value) is int and abs(value) < 1 << 53 else value
        for key, value in mapping.items()
    }
