"""What is said of one kind of event: its fields, and the line people read instead. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TYPES: Mapping[str, tuple[type, ...]] = {
    "text": (str,),
    "int": (int,),
    "number": (int, float),
    "bool": (bool,),
    "list": (list, tuple),
    "object": (dict,),
}
"""Field types by name. A trailing `?` in a spec means that the field may be null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSpec:
    """`fields` maps a name to "type: meaning". `text` is the line for people, empty where they need none.

    `live`: on a terminal that line takes the place of the one before. `complaint` names the field with which the same
    line would come again and again: people then read it the first time, the 10th, the 100th….
    """

    about: str
    fields: Mapping[str, str]
    text: str = ""
    live: bool = False
    complaint: str = ""

    def field_type(self, name: str) -> tuple[str, bool]:
        """The type's name and whether null is allowed."""
        type_name = self.fields[name].split(":", 1)[0]
        return type_name.removesuffix("?"), type_name.endswith("?")
