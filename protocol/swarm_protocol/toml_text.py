"""Writes TOML, and parses what a user or a peer has written: in bounded time, and with one kind of error. Pure.

The caller bounds the size of the text, and checks what its values mean.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

from swarm_protocol.errors import ConfigError

MAX_KEY_WORDS = 32
"""Maximum words in one dotted key. The parser's time grows with their square: 20,000 words took 42 s."""

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1
"""TOML's range. The parser accepts any number, but Python writes none of more than 4300 digits into a message."""

_WORD = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_WORD}(?:[ \t]*+\.[ \t]*+{_WORD}){{{MAX_KEY_WORDS},}}")


def parse_toml(text: str, path: Path | str, *, remedy: str = "correct it there") -> dict[str, Any]:
    """Parse the text of the file `path`. Raises ConfigError, with this remedy, for a text that is not TOML, is nested
    too deeply, or has an integer beyond 64 bits or a dotted key of too many words."""
    if _LONG_KEY.search(text) is not None:
        raise ConfigError(
            f"{path} has a dotted key of more than {MAX_KEY_WORDS} words", remedy="use flat keys below a line [table]"
        )
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply", remedy=remedy) from error
    except ValueError as error:  # of a decimal number of too many digits it is no TOMLDecodeError
        raise ConfigError(f"{path} is not valid TOML: {error}", remedy=remedy) from error
    if _has_integer_out_of_range(table):
        raise ConfigError(f"{path} is not valid TOML: it has an integer of more than 64 bits", remedy=remedy)
    return table


def _has_integer_out_of_range(table: Mapping[str, Any]) -> bool:
    todo: list[object] = [table]
    while todo:
        match todo.pop():
            case dict() as inner:
                todo += inner.values()
            case list() as inner:
                todo += inner
            case int() as number if not MIN_INTEGER <= number <= MAX_INTEGER:
                return True
    return False


def to_toml(mapping: Mapping[str, Any]) -> str:
    """Return `mapping` as TOML: values first, then a table for each mapping, with deeper mappings inline. Keys are bare
    words."""
    lines = [f"{key} = {toml_value(value)}" for key, value in mapping.items() if not isinstance(value, Mapping)]
    for key, table in mapping.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{key}]", *(f"{name} = {toml_value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """Return `value` as TOML, and a value of a type that TOML lacks, which only messages contain, as Python."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, date | time):
        return value.isoformat()
    return _text(value) if isinstance(value, str) else repr(value)


def _text(text: str) -> str:
    # a JSON string is a TOML string, but invisible characters are escaped, too: DEL by TOML's rule, and those that a
    # terminal obeys, since messages repeat what a stranger's file has
    return "".join(each if each.isprintable() else _escaped(each) for each in json.dumps(text, ensure_ascii=False))


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"
