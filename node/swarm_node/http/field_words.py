"""The messages about wrong fields of requests, for each of pydantic's error types.

The gateway and the dashboard share them. A message says what was sent, and what is allowed. Only short values are
repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_GIVEN_CHARS = 40
"""The most characters of a value that is repeated. For a longer value, its type is named."""

WANTED: Mapping[str, str] = {
    "bool_type": "true or false",
    "dict_type": "a JSON object",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a JSON object",
    "string_or_list": "a string or a list",
    "string_type": "a string",
    "union_tag_invalid": "one of {expected_tags}",
    "unknown_role": "{expected}",
    "vocabulary_index": "a token id, such as 50256",
}
"""The allowed types, for each of pydantic's errors about a value of another type."""

WORDS: Mapping[str, str] = {
    "finite_number": "it is not a finite number",
    "greater_than": "it must be greater than {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must be less than {lt}",
    "less_than_equal": "it must be at most {le}",
    "missing": "it is missing",
    "string_pattern_mismatch": "it does not match {pattern}",
    "string_too_long": "it must have at most {max_length} characters",
    "string_too_short": "it must not be empty",
    "string_unicode": "it is not valid Unicode",
    "too_long": "it must have at most {max_length} items",
    "too_short": "it must not be empty",
    "union_tag_not_found": "it is missing",
}
"""The messages of pydantic's other errors."""


def words(error: Mapping[str, Any]) -> str:
    """Return the message for a pydantic error. An unknown error keeps pydantic's message."""
    kind, given = error["type"], error["input"]
    if kind == "float_type" and isinstance(given, int) and not isinstance(given, bool):
        kind = "finite_number"  # an integer of hundreds of digits
    if kind in WANTED:
        return f"it is {shown(given)}, and not {wanted(error)}"
    return WORDS[kind].format(**_bounds(error)) if kind in WORDS else str(error["msg"])


def wanted(error: Mapping[str, Any]) -> str:
    """Return the types that the field allows, for an error in `WANTED`."""
    return WANTED[error["type"]].format(**_bounds(error))


def shown(value: object) -> str:
    """Return a short value as it was sent, or the type of a longer value."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value) if isinstance(value, str | int | float) else ""
    if text and len(text) <= MAX_GIVEN_CHARS:
        return text
    kinds = {str: "a string", list: "a list", dict: "a JSON object", int: "a number", float: "a number"}
    return kinds.get(type(value), "something else")


def _bounds(error: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bounds that an error names, with 2 instead of 2.0."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in error.get("ctx", {}).items()
    }
