"""Defines the body of a request to the Responses API, and translates it into the chat request that is answered.

What both have in common, such as tools, formats and bounds, is checked there. Nothing is stored: fields that refer to
earlier responses are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from openai.types.responses import ResponseIncludable
from openai.types.shared import ReasoningEffort
from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag, ValidationError, model_validator
from pydantic_core import to_json

from swarm_node.gateway import http_limits
from swarm_node.gateway.chat_schema import (
    ChatRequest,
    FunctionName,
    Name,
    TemplateKwargs,
    Verbosity,
)
from swarm_node.gateway.request_schema import (
    WHOLE,
    AnyObject,
    AnyText,
    JsonObject,
    Label,
    MaxTokens,
    NamedSchema,
    Neutral,
    OrDefault,
    SharedFields,
    StrictBody,
    Text,
    unfit,
)
from swarm_node.http.field_words import words

LOGPROBS = "message.output_text.logprobs"
RENAMED = {"max_completion_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
"""The fields that a chat request has under other names."""
ECHOED = {
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "prompt_cache_key"),
    *("reasoning", "safety_identifier", "temperature", "text", "tool_choice", "top_logprobs", "top_p", "user"),
}
"""The fields that an answer repeats, apart from the tools."""


class MessagePart(StrictBody):
    """A text of the user or, as the gateway sent it, of the assistant."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class RefusalPart(StrictBody):
    """An answer of another service in which the model refused."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[
    Annotated[MessagePart, Tag("MessagePart")] | Annotated[RefusalPart, Tag("RefusalPart")],
    Discriminator(
        lambda part: "RefusalPart" if isinstance(part, dict) and part.get("type") == "refusal" else "MessagePart"
    ),
]
Content = Text | Annotated[list[Part], Field(max_length=http_limits.MAX_MESSAGE_PARTS, fail_fast=True)]


class Item(StrictBody):
    """The base of all items. An item of an earlier answer has an id and a status, which have no effect."""

    id: Label | None = None
    status: Label | None = None

    def add_to(self, messages: list[JsonObject]) -> None:
        """Add the item to the messages of a chat, or leave it out."""


class Message(Item):
    """A message, also one that the gateway sent. `phase` has no effect."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Label | None = None

    def add_to(self, messages: list[JsonObject]) -> None:
        if self.role != "assistant" or not messages or "tool_calls" not in messages[-1]:
            messages.append({"role": self.role, "content": []})
        # a text after a call belongs to the call's message
        messages[-1]["content"].append({"type": "text", "text": _text(self.content)})


class FunctionCall(Item):
    """A call that the model made earlier. Calls and the text before them are one message of a chat. OpenAI's Python
    objects dump `async` as `async_`."""

    neutral: ClassVar[Neutral] = {"async": (False,), "async_": (False,), "caller": (), "namespace": ()}

    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: Text
    parsed_arguments: Any = None

    def add_to(self, messages: list[JsonObject]) -> None:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": []})
        function = {"name": self.name, "arguments": self.arguments}
        messages[-1].setdefault("tool_calls", []).append({"id": self.call_id, "function": function})


class FunctionCallOutput(Item):
    """The result of a call, which the client sends back."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content

    def add_to(self, messages: list[JsonObject]) -> None:
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)})


class ReasoningItem(Item):
    """Thoughts of a model of another service. They are left out, as chat templates leave out earlier thoughts."""

    type: Literal["reasoning"]
    summary: Any = None
    content: Any = None
    encrypted_content: Any = None


def _text(content: str | list[MessagePart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


_TAGS = {
    "message": "Message",
    "function_call": "FunctionCall",
    "function_call_output": "FunctionCallOutput",
    "reasoning": "ReasoningItem",
}


def _kind(item: object) -> str | None:
    """Return the tag of the item's class, or None for an unknown type. An item without a type is a message."""
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return _TAGS.get(kind) if isinstance(kind, str) else None


def _no_reference(item: object) -> object:
    if isinstance(item, dict) and item.get("type") == "item_reference":
        raise unfit("type", "nothing is stored here: send the items themselves, as clients do with store set to false")
    return item


AnyItem = Annotated[
    Annotated[Message, Tag("Message")]
    | Annotated[FunctionCall, Tag("FunctionCall")]
    | Annotated[FunctionCallOutput, Tag("FunctionCallOutput")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="it is not one of 'message', 'function_call', 'function_call_output', 'reasoning'",
    ),
    BeforeValidator(_no_reference),
]
Items = Annotated[list[AnyItem], Field(min_length=1, max_length=http_limits.MAX_RESPONSES_ITEMS, fail_fast=True)]


class FunctionTool(StrictBody):
    """A function that the client offers. Tools that OpenAI runs itself are not offered."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _are_beside_the_type(cls, value: object) -> object:
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            raise unfit("function", "give its fields in place of it, beside the type")  # a chat's form
        return value


class ChosenFunction(StrictBody):
    """A `tool_choice` that names the one function that must be called."""

    type: Literal["function"]
    name: FunctionName


class SchemaFormat(NamedSchema):
    """A format that is JSON which fits a schema."""

    type: Literal["json_schema"]


def _untyped(value: FunctionTool | ChosenFunction) -> JsonObject:
    """Return what a chat request has inside an object of the same type."""
    return {name: inner for name, inner in value if name != "type"}


class TextOptions(StrictBody):
    """The form of the answer's text."""

    format: Annotated[
        Annotated[AnyText | AnyObject | SchemaFormat, Field(discriminator="type")], OrDefault({"type": "text"})
    ] = Field(default_factory=lambda: AnyText(type="text"))
    verbosity: Verbosity = None


class ReasoningOptions(StrictBody):
    """Options of the model's thinking. No summary is made."""

    neutral: ClassVar[Neutral] = {"context": ("auto",), "mode": ("standard",)}

    effort: ReasoningEffort = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(SharedFields):
    """The body of a request to `/v1/responses`. `client_metadata` is what Codex notes about a request."""

    neutral: ClassVar[Neutral] = {
        **SharedFields.neutral,
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "truncation": ("disabled",),
    }

    input: Text | Items
    instructions: Text | None = None
    max_output_tokens: MaxTokens | None = None
    max_tool_calls: MaxTokens | None = None  # of OpenAI's own tools
    tools: Annotated[list[FunctionTool], Field(max_length=http_limits.MAX_TOOLS, fail_fast=True), OrDefault([])] = (
        Field(default_factory=list)
    )
    tool_choice: Annotated[Literal["none", "auto", "required"] | ChosenFunction, OrDefault("auto")] = "auto"
    parallel_tool_calls: Annotated[bool, OrDefault(True)] = True
    text: Annotated[TextOptions, OrDefault({})] = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[ResponseIncludable], Field(max_length=16, fail_fast=True), OrDefault([])] = Field(
        default_factory=list
    )
    top_logprobs: Annotated[int, Field(ge=0, le=http_limits.MAX_CHAT_LOGPROBS), WHOLE, OrDefault(0)] = 0
    prompt_cache_options: JsonObject | None = None
    client_metadata: JsonObject | None = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    _chat: ChatRequest = PrivateAttr()

    @property
    def chat(self) -> ChatRequest:
        """The chat request with the same answer."""
        return self._chat

    @model_validator(mode="after")
    def _can_be_repeated(self) -> ResponsesRequest:
        for name, value in (("tools", self.tools), ("text.format", self.text)):
            try:
                to_json([[value]])  # as deep as in an event
            except ValueError:
                raise unfit(name, "it is nested too deeply to be repeated, or not valid Unicode") from None
        return self

    @model_validator(mode="after")
    def _translate(self) -> ResponsesRequest:
        """Raise what is wrong with the chat request, under this request's names."""
        shared = {name: getattr(self, name) for name in SharedFields.model_fields}
        try:
            self._chat = TranslatedRequest.model_validate({**shared, **self._own()})
        except ValidationError as error:
            first = error.errors()[0]
            is_unfit = first["type"] == "unfit"
            name = first["ctx"]["name"] if is_unfit else str(first["loc"][0])
            raise unfit(RENAMED.get(name, name), first["ctx"]["why"] if is_unfit else words(first)) from None
        return self

    def _own(self) -> JsonObject:
        """Return the fields of the chat request that are not shared."""
        choice, form = self.tool_choice, self.text.format
        has_schema = isinstance(form, SchemaFormat)
        return {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [{"type": "function", "function": _untyped(tool)} for tool in self.tools],
            "tool_choice": choice if isinstance(choice, str) else {"type": "function", "function": _untyped(choice)},
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": {"type": "json_schema", "json_schema": form} if has_schema else form,
            "logprobs": LOGPROBS in self.include or self.top_logprobs > 0,
            "top_logprobs": self.top_logprobs,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "verbosity": self.text.verbosity,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    def _messages(self) -> list[JsonObject]:
        messages: list[JsonObject] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            item.add_to(messages)
        return messages

    def echoed(self) -> JsonObject:
        """Return the fields of the request that the answer repeats."""
        return {**self.model_dump(include=ECHOED, by_alias=True), "tools": [dict(tool) for tool in self.tools]}


class TranslatedRequest(ChatRequest):
    """A chat request whose errors name the fields of the Responses API."""

    @property
    def field_names(self) -> dict[str, str]:
        return {setting: RENAMED.get(name, name) for setting, name in super().field_names.items()}
