"""Says in plain words what is wrong with a field of a request, by what pydantic found.

Both HTTP servers answer in these words: what was sent, and what may be. They repeat a short value only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

MAX_GIVEN_CHARS = 40
"""The longest value that is repeated; of a longer one its kind is named."""

WANTED = MappingProxyType(
    {
        "bool_type": "true or false",
        "dict_type": "a JSON object",
        "float_parsing": "a number",
        "float_type": "a number",
        "int_from_float": "a whole number",
        "int_parsing": "a whole number",
        "int_type": "a whole number",
        "list_type": "a list",
        "literal_error": "{expected}",
        "model_attributes_type": "a JSON object",
        "string_or_list": "a text or a list",
        "string_type": "a text",
        "union_tag_invalid": "one of {expected_tags}",
        "unknown_role": "{expected}",
        "vocabulary_index": "a token id, such as 50256",
    }
)
"""By pydantic's name of the error, the kinds that a field of another kind has to be of."""

WORDS = MappingProxyType(
    {
        "finite_number": "it is not a finite number",
        "greater_than": "it has to be more than {gt}",
        "greater_than_equal": "it may not be less than {ge}",
        "less_than": "it has to be less than {lt}",
        "less_than_equal": "it may not be more than {le}",
        "missing": "it is missing",
        "string_pattern_mismatch": "it does not match {pattern}",
        "string_too_long": "it may have {max_length} characters at most",
        "string_too_short": "it may not be empty",
        "string_unicode": "it is not a text in Unicode",
        "too_long": "it may have {max_length} entries at most",
        "too_short": "it may not be empty",
        "union_tag_not_found": "it is missing",
    }
)
"""The other errors of fields, in words."""


def words(error: Mapping[str, Any]) -> str:
    """Return what is wrong, by one of pydantic's errors; its own words for an error that is not known here."""
    kind, given = error["type"], error["input"]
    if kind == "float_type" and isinstance(given, int) and not isinstance(given, bool):
        kind = "finite_number"  # of hundreds of digits
    if kind in WANTED:
        return f"it is {shown(given)}, and not {wanted(error)}"
    return WORDS[kind].format(**_bounds(error)) if kind in WORDS else str(error["msg"])


def wanted(error: Mapping[str, Any]) -> str:
    """Return what the field may be, by an error in `WANTED`."""
    return WANTED[error["type"]].format(**_bounds(error))


def shown(value: object) -> str:
    """Return a short value as it was sent, and of another one the kind."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value) if isinstance(value, str | int | float) else ""
    if text and len(text) <= MAX_GIVEN_CHARS:
        return text
    kinds = {str: "a text", list: "a list", dict: "a JSON object", int: "a number", float: "a number"}
    return kinds.get(type(value), "something else")


def _bounds(error: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an error says of the allowed values, with 2 in place of 2.0."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in error.get("ctx", {}).items()
    }
