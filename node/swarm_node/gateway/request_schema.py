"""Defines the fields of requests, each bounded. Those of one endpoint are in `completion_schema`, `chat_schema` and
`responses_schema`.

Each field that can change an answer is honoured or refused by name, unknown ones included: silently ignoring it would
answer a different request. A known but unsupported field may have a value that changes nothing, because clients send
such values. Labels and notes, and hints about storage and caches, change no answer: they are accepted.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from swarm.client.request import schema_grammar
from swarm.serving.sampling.sampling import MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS, OWN_DEFAULTS, Sampling
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Grammar

from swarm_node.gateway import http_limits

MAX_NAME_CHARS = 64  # of an unknown field that are compared with known fields

Neutral = Mapping[str, tuple[Any, ...]]
"""Known but unsupported fields, with the values besides null that change nothing."""


def unfit(name: str, why: str) -> PydanticCustomError:
    """Return the error for a field that conflicts with another."""
    return PydanticCustomError("unfit", "{name}: {why}", {"name": name, "why": why})


def check_one_or_many(value: Any) -> None:
    """Refuse a value that is neither a string nor a list, for a field that takes both."""
    if not isinstance(value, str | list):
        raise PydanticCustomError("string_or_list", "it is not a string or a list")


@dataclass(frozen=True, slots=True)
class OrDefault:
    """Accepts null for the default, since OpenAI's clients send null."""

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
"""Accepts 5.0 as an integer, since JSON has one type for numbers.

WHOLE and OrDefault must come last in an annotation: otherwise the JSON schema lacks the bounds.
"""


class StrictBody(BaseModel):
    """The base of all request bodies. Values are not converted: the string "5" is not a number.

    However much is wrong with a body, few errors are collected, because each costs microseconds and a kilobyte or two:
    only one unknown field is looked at, and a list ends with its first error (`fail_fast`).
    """

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
                raise PydanticCustomError("unsupported", "'{name}' is not supported", {"name": name})
        known = _names_of(cls)
        unknown = next((name for name in data if name not in known and name not in cls.neutral), None)
        # less alike names mean other things, such as max_completion_tokens and min_tokens
        if unknown is not None and (near := get_close_matches(unknown[:MAX_NAME_CHARS], known, n=1, cutoff=0.75)):
            raise PydanticCustomError("misspelt", "unknown parameter '{name}'", {"name": unknown, "near": near[0]})
        return {name: value for name, value in data.items() if name in known or name == unknown}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = handler.resolve_ref_schema(handler(schema))
        for name, allowed in cls.neutral.items():
            about = "not supported: any other value is refused"
            described.setdefault("properties", {})[name] = {"enum": [*allowed, None], "description": about}
        return described


@cache
def _names_of(body: type[BaseModel]) -> frozenset[str]:
    """Return the names of a body's fields in JSON."""
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def _same(value: object, other: object) -> bool:
    """Compare as JSON does: 1 equals 1.0, and true equals neither."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


INT64 = 2**63

Text = Annotated[str, Field(max_length=http_limits.MAX_PROMPT_CHARS)]
ModelName = Annotated[str, Field(min_length=1, max_length=http_limits.MAX_MODEL_NAME_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=limits.MAX_VOCAB), WHOLE]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=http_limits.MAX_TOKEN_IDS, fail_fast=True)]
MaxTokens = Annotated[int, Field(ge=1, le=http_limits.MAX_NEW_TOKENS), WHOLE]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY, allow_inf_nan=False), OrDefault(0.0)]
Repetition = Annotated[float, Field(gt=0, le=limits.MAX_REPETITION_PENALTY, allow_inf_nan=False)]
VOCABULARY_INDEX = r"^(0|[1-9][0-9]{0,5})$"


def _vocabulary_index(text: str) -> str:
    if not re.fullmatch(VOCABULARY_INDEX, text):
        raise PydanticCustomError("vocabulary_index", "it is not a token id")
    return text


Bias = Annotated[float, Field(ge=-limits.MAX_BIAS, le=limits.MAX_BIAS, allow_inf_nan=False)]


def _at_most(most: int) -> BeforeValidator:
    """Return what refuses an object of too many items before each of them is checked."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_many", "must have at most {most} items", {"most": most})
        return value

    return BeforeValidator(check)


Biases = Annotated[
    dict[Annotated[str, AfterValidator(_vocabulary_index)], Bias],
    _at_most(limits.MAX_BIASES),
    WithJsonSchema(
        {
            "type": "object",
            "description": "by token id",
            "patternProperties": {
                VOCABULARY_INDEX: {"type": "number", "minimum": -limits.MAX_BIAS, "maximum": limits.MAX_BIAS}
            },
            "additionalProperties": False,
            "maxProperties": limits.MAX_BIASES,
        }
    ),
]
Label = Annotated[str, Field(max_length=http_limits.MAX_LABEL_CHARS)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=http_limits.MAX_METADATA),
    _at_most(http_limits.MAX_METADATA),
]
"""Notes of a client about its request, bounded as in OpenAI's API."""


def _with_readable_names(value: Any) -> Any:
    """Refuse names that hold an unpaired surrogate, as it is refused in every string."""
    if isinstance(value, dict):
        try:
            "".join(value).encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("string_unicode", "names must be valid Unicode") from None
    return value


JsonObject = Annotated[dict[str, Any], BeforeValidator(_with_readable_names)]


def one_or_many(value: Any) -> Any:
    """Return a list of one for a single stop string, which OpenAI's API accepts without a list."""
    if value is None:
        return []
    check_one_or_many(value)
    return [value] if isinstance(value, str) else value


class StreamOptions(StrictBody):
    """OpenAI's options of a streamed answer. Events are never padded, whatever `include_obfuscation` says."""

    neutral: ClassVar[Neutral] = {"continuous_usage_stats": (False,)}

    include_obfuscation: bool | None = None
    include_usage: Annotated[bool, OrDefault(False)] = False


class NamedSchema(StrictBody):
    """OpenAI's form of a JSON schema. Answers always fit it, so `strict` changes nothing."""

    name: Label
    description: Text | None = None
    strict: bool | None = None
    schema_: Annotated[JsonObject, Field(alias="schema"), OrDefault({})] = Field(default_factory=dict)


class AnyText(StrictBody):
    """A response format without a constraint."""

    type: Literal["text"]


class AnyObject(StrictBody):
    """A response format that is any JSON object."""

    type: Literal["json_object"]


class FittingText(StrictBody):
    """A response format that is JSON which fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[AnyText | AnyObject | FittingText, Field(discriminator="type")]


class SharedFields(StrictBody):
    """The fields that all three endpoints share. Those from `metadata` on change no answer; nothing is stored."""

    neutral: ClassVar[Neutral] = {
        "service_tier": ("auto", "default"),  # all others are vLLM's
        "allowed_token_ids": (),
        "bad_words": ([],),
        "cache_salt": (),
        "early_stopping": (False,),
        "guided_choice": (),
        "guided_decoding_backend": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": (),
        "length_penalty": (1.0,),
        "logits_processors": ([],),
        "priority": (0,),
        "prompt_logprobs": (),
        "request_id": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "structural_tag": (),
        "structured_outputs": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "vllm_xargs": (),
    }

    model: ModelName
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=http_limits.MAX_TOP_K, description="0 and -1: no limit"), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Repetition | None = None
    logit_bias: Annotated[Biases, OrDefault({})] = Field(default_factory=dict)
    seed: Annotated[int, Field(gt=-INT64, lt=INT64), WHOLE] | None = None
    stop: Annotated[Stops, BeforeValidator(one_or_many, json_schema_input_type=Stops | StopText | None)] = Field(
        default_factory=list
    )
    include_stop_str_in_output: Annotated[bool, OrDefault(False)] = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True), OrDefault([])] = Field(
        default_factory=list
    )
    min_tokens: Annotated[int, Field(ge=0, le=limits.MAX_SESSION_TOKENS), WHOLE, OrDefault(0)] = 0
    ignore_eos: Annotated[bool, OrDefault(False)] = False
    stream: Annotated[bool, OrDefault(False)] = False
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None


class SamplingRequest(SharedFields):
    """The fields of chats and completions."""

    neutral: ClassVar[Neutral] = {**SharedFields.neutral, "best_of": (1,)}

    max_tokens: MaxTokens | None = None
    n: Annotated[int, Field(ge=1, le=http_limits.MAX_CHOICES), WHOLE, OrDefault(1)] = 1
    response_format: ResponseFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _best_of_as_many_as_are_asked_for(cls, data: Any) -> Any:
        """Refuse a `best_of` below `n`, as OpenAI does. `best_of` has no other effect here."""
        if isinstance(data, dict):
            best_of, n = data.get("best_of"), data.get("n")
            if isinstance(best_of, int | float) and isinstance(n, int | float) and best_of < n:
                raise unfit("best_of", "must be at least n")
        return data

    @model_validator(mode="after")
    def _stream_options_of_a_stream(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise unfit("stream_options", "requires stream to be true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def field_names(self) -> dict[str, str]:
        """The request's field for each setting to which the SDK gives another name."""
        return {"grammar": self.grammar_field}

    @property
    def grammar_field(self) -> str:
        """The field that the answer's grammar comes from. Valid only if the answer has a grammar."""
        return "tools" if self.answer_schema() is None else "response_format"

    def grammar(self) -> Grammar | None:
        """Return the grammar that the answer must fit, or None. Raises ConfigError if the grammar is too large."""
        schema = self.answer_schema()
        return None if schema is None else schema_grammar(schema)

    def answer_schema(self) -> JsonObject | None:
        """Return the JSON schema that the answer must fit. None allows any answer."""
        if isinstance(self.response_format, FittingText):
            return self.response_format.json_schema.schema_
        return {"type": "object"} if isinstance(self.response_format, AnyObject) else None

    def shown_stops(self) -> tuple[str, ...]:
        """Return the stop strings that are part of the answer's text."""
        return tuple(self.stop) if self.include_stop_str_in_output else ()

    @model_validator(mode="after")
    def _drawable(self) -> SamplingRequest:
        """Validate the sampling settings before the request is sent."""
        try:
            self.samplings()
        except ConfigError as error:
            raise unfit(self.grammar_field, str(error)) from None
        return self

    def samplings(self) -> Sequence[Sampling]:
        """Return one Sampling for each of the `n` answers. What was left out has OpenAI's defaults.

        The first has the request's seed, and the others have seeds derived from it. Without a seed each has a random
        one. Raises ConfigError for settings that conflict.
        """
        given = {name: value for name in OWN_DEFAULTS if (value := getattr(self, name)) is not None}
        sampling = Sampling(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((int(token_id), bias) for token_id, bias in self.logit_bias.items()),
            stop=() if self.include_stop_str_in_output else tuple(self.stop),
            stop_after=self.shown_stops(),
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            grammar=self.grammar(),
            **{"temperature": 1.0, **given, "top_k": max(0, self.top_k or 0)},
        )
        seeds = (secrets.randbits(63) if self.seed is None else _derived(self.seed, index) for index in range(self.n))
        return [replace(sampling, seed=seed) for seed in seeds]


def _derived(seed: int, index: int) -> int:
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"choice {seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
