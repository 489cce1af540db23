"""Defines how an event is specified: its fields with their types, and its line for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

TYPES: Mapping[str, tuple[type, ...]] = {
    "text": (str,),
    "int": (int,),
    "number": (int, float),
    "bool": (bool,),
    "list": (list, tuple),
    "object": (dict,),
}
"""The types of a field by name. A trailing `?` in a spec means that the field may be null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSpec:
    """One kind of event. `fields` maps a name to "type: meaning". `text` is the line for people, or "".

    `live` means that on a terminal the line replaces the one before. `repeated_field` is the field that is equal when
    an event repeats: people then see the line only the first, 10th, 100th, … time.
    """

    about: str
    fields: Mapping[str, str]
    text: str = ""
    live: bool = False
    repeated_field: str = ""

    def field_type(self, name: str) -> tuple[str, bool]:
        """Return the type's name, and whether null is allowed."""
        type_name = self.fields[name].split(":", 1)[0]
        return type_name.removesuffix("?"), type_name.endswith("?")


def event_spec(
    about: str, text: str = "", /, *, live: bool = False, repeated_field: str = "", **fields: str
) -> EventSpec:
    """Return the specification of one kind of event. Its `fields` are keyword arguments."""
    return EventSpec(about=about, text=text, live=live, repeated_field=repeated_field, fields=fields)


run_event = partial(event_spec, run="text: the run's id")
"""Return the specification of an event of a run, whose first field is the run's id."""
