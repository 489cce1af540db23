"""The base of everything a client may send: each field is honoured or refused by its name, unknown ones too.

To ignore a field silently would be to answer another question. A field that is known and not offered may hold what
changes nothing, for clients send such values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Neutral = Mapping[str, tuple[Any, ...]]
"""Fields that are known and not offered, with the values beside null that change nothing."""


def unsupported(name: str, hint: str = "leave it out") -> PydanticCustomError:
    """A field that is known, and not offered."""
    return PydanticCustomError(
        "unsupported", "'{name}' is not supported by this gateway: {hint}", {"name": name, "hint": hint}
    )


def unfit(name: str, why: str) -> PydanticCustomError:
    """A field that does not go with another."""
    return PydanticCustomError("unfit", "{name}: {why}", {"name": name, "why": why})


@dataclass(frozen=True, slots=True)
class OrDefault:
    """OpenAI's clients send null for 'use the default'."""

    default: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: self.default if value is None else value, handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "null"}]}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""JSON knows one kind of numbers: 5.0 is a whole one. It and OrDefault come last, or bounds would not be described."""


class StrictBody(BaseModel):
    """Values are of the kinds they are said to be: the text "5" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_changes_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in data.keys() & cls.neutral.keys():
            value = data[name]
            if value is not None and not any(_same(value, allowed) for allowed in cls.neutral[name]):
                raise unsupported(name)
        return {name: value for name, value in data.items() if name not in cls.neutral}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = handler.resolve_ref_schema(handler(schema))
        for name, allowed in cls.neutral.items():
            about = "not supported: any other value is refused"
            described.setdefault("properties", {})[name] = {"enum": [*allowed, None], "description": about}
        return described


def _same(value: object, other: object) -> bool:
    """As JSON has it: 1 is 1.0, and true is neither."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
