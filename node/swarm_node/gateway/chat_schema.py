"""Defines the body of a chat request: messages, tools and probabilities, each field bounded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from openai.types.shared import ReasoningEffort
from pydantic import AfterValidator, Discriminator, Field, GetJsonSchemaHandler, Tag, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from swarm.client.request import Prompt
from swarm_protocol.sampler import Grammar

from swarm_node.gateway import http_limits
from swarm_node.gateway.admission import has_more_values
from swarm_node.gateway.choice import CLOSING, Schema, calls_grammar
from swarm_node.gateway.request_schema import (
    WHOLE,
    JsonObject,
    MaxTokens,
    Neutral,
    OrDefault,
    SamplingRequest,
    StrictBody,
    Text,
    unfit,
)
from swarm_node.http.field_words import shown

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(StrictBody):
    """A text. `cache_control` is a hint that clients of several services send, and has no effect."""

    type: Literal["text"]
    text: Text
    cache_control: Any = None


class CalledFunction(StrictBody):
    """The function that a model called. `arguments` is JSON text, and `parsed_arguments` OpenAI's client's copy of it,
    which is not used."""

    name: FunctionName
    arguments: Text
    parsed_arguments: Any = None

    def decoded(self) -> Any:
        """Return the arguments decoded, since chat templates encode them themselves.

        Arguments that are not a JSON object are returned as they were sent.
        """
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments
        return arguments if isinstance(arguments, dict) else self.arguments


class CallMessage(StrictBody):
    """A call that the assistant made earlier in the conversation. A call copied from a stream also has its `index`."""

    neutral: ClassVar[Neutral] = {"index": tuple(range(http_limits.MAX_TOOL_CALLS))}

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def flat(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.decoded()}
        return {"id": self.id, "type": "function", "function": function}


Content = Text | Annotated[list[TextPart], Field(max_length=http_limits.MAX_MESSAGE_PARTS, fail_fast=True)]
Name = Annotated[str, Field(max_length=256)]


class PromptMessage(StrictBody):
    """A message of the system or the user. 'developer' is OpenAI's newer name for 'system'."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: Name | None = None

    def flat(self) -> dict[str, Any]:
        return _flat("user" if self.role == "user" else "system", self.content, self.name)


class AssistantMessage(StrictBody):
    """An earlier answer. Clients send it back as they got it, with its empty fields. `parsed` is OpenAI's client's copy
    of a JSON answer, and is not used."""

    neutral: ClassVar[Neutral] = {
        "annotations": ([],),
        **dict.fromkeys(("audio", "function_call", "reasoning", "reasoning_content", "refusal"), ()),
    }

    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    parsed: Any = None
    tool_calls: Annotated[list[CallMessage], Field(max_length=http_limits.MAX_TOOL_CALLS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _complete(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise unfit("content", "a message of role 'assistant' needs content or tool_calls")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = super().__get_pydantic_json_schema__(schema, handler)
        described["anyOf"] = [
            {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
            {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
        ]
        return described

    def flat(self) -> dict[str, Any]:
        flat = _flat("assistant", self.content or "", self.name)
        return {**flat, "tool_calls": [call.flat() for call in self.tool_calls]} if self.tool_calls else flat


class ToolMessage(StrictBody):
    """The result of a tool call, which the client sends back."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name
    name: Name | None = None

    def flat(self) -> dict[str, Any]:
        return {**_flat("tool", self.content, self.name), "tool_call_id": self.tool_call_id}


def _flat(role: str, content: str | list[TextPart], name: str | None) -> dict[str, Any]:
    """Return the message as chat templates expect it: plain text."""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": role, "content": text, **({} if name is None else {"name": name})}


_TAGS = {
    "system": "PromptMessage",
    "developer": "PromptMessage",
    "user": "PromptMessage",
    "assistant": "AssistantMessage",
    "tool": "ToolMessage",
}


def _kind(message: object) -> str | None:
    """Return the tag of the message's class, or None for an unknown role."""
    if not isinstance(message, dict) or "role" not in message:
        return "PromptMessage"  # its error message fits a message without a role
    return _TAGS.get(str(message["role"]))


ChatMessage = Annotated[
    Annotated[PromptMessage, Tag("PromptMessage")]
    | Annotated[AssistantMessage, Tag("AssistantMessage")]
    | Annotated[ToolMessage, Tag("ToolMessage")],
    Discriminator(
        _kind,
        custom_error_type="unknown_role",
        custom_error_message="the role is not known",
        custom_error_context={"expected": f"one of {', '.join(map(repr, _TAGS))}"},
    ),
]


def _checked_calls(messages: list[Any]) -> list[Any]:
    """Refuse calls whose arguments have too many values: the template gets them parsed, so they cost what a body costs.
    Refuse results of calls that no earlier message has, as OpenAI does."""
    most = http_limits.MAX_HTTP_VALUES
    calls = [call for each in messages if isinstance(each, AssistantMessage) for call in each.tool_calls or ()]
    if has_more_values([call.function.arguments.encode() for call in calls], most):
        message = "the arguments of the calls have over {most} objects, lists and strings"
        raise PydanticCustomError("too_many", message, {"most": most})
    known = set[str]()
    for each in messages:
        if isinstance(each, AssistantMessage):
            known.update(call.id for call in each.tool_calls or ())
        elif isinstance(each, ToolMessage) and each.tool_call_id not in known:
            message = "it has the result of the call {id}, and not the call before it"
            raise PydanticCustomError("no_call", message, {"id": shown(each.tool_call_id)})
    return messages


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=http_limits.MAX_CHAT_MESSAGES, fail_fast=True),
    AfterValidator(_checked_calls),
]


class Function(StrictBody):
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(StrictBody):
    """A tool that the client offers. The only type is a function."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=http_limits.MAX_TOOLS, fail_fast=True), OrDefault([])]
TemplateKwargs = Annotated[JsonObject, Field(max_length=http_limits.MAX_TEMPLATE_KWARGS), OrDefault({})]
Verbosity = Literal["low", "medium", "high"] | None


def chat_prompt(messages: Sequence[ChatMessage], tools: Sequence[Tool], template_kwargs: JsonObject) -> Prompt:
    """Return the prompt for the model's chat template to render."""
    return Prompt(
        prompt=None,
        messages=[message.flat() for message in messages],
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        template_kwargs=template_kwargs,
    )


class NamedFunction(StrictBody):
    """The name of the function that must be called."""

    name: FunctionName


class NamedTool(StrictBody):
    """A `tool_choice` that names the one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class Prediction(StrictBody):
    """A guess of the answer, which OpenAI's API takes to be faster. It changes no answer, and has no effect."""

    type: Literal["content"]
    content: Content


class ChatRequest(SamplingRequest):
    """The body of a request to `/v1/chat/completions`. Its answer never begins with the prompt."""

    echo: ClassVar[bool] = False
    neutral: ClassVar[Neutral] = {
        **SamplingRequest.neutral,
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "include_reasoning": (True,),
        "mm_processor_kwargs": (),
        "modalities": (["text"],),
        "web_search_options": (),
    }

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: Annotated[bool, OrDefault(False)] = False
    top_logprobs: Annotated[int, Field(ge=0, le=http_limits.MAX_CHAT_LOGPROBS), WHOLE, OrDefault(0)] = 0
    tools: Tools = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Annotated[bool, OrDefault(True)] = True
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    reasoning_effort: ReasoningEffort = None
    verbosity: Verbosity = None
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise unfit("top_logprobs", "requires logprobs to be true")
        if None not in {self.max_tokens, self.max_completion_tokens} and self.max_tokens != self.num_new_tokens:
            raise unfit("max_tokens", "it differs from max_completion_tokens, its newer name: send one of them")
        if len({tool.function.name for tool in self.tools}) < len(self.tools):
            raise unfit("tools", "two of them have the same name")
        if self._must_call and not self.tools:
            raise unfit("tool_choice", "there are no tools to call: describe them in tools")
        if isinstance(self.tool_choice, NamedTool) and not self._callable():
            raise unfit("tool_choice", f"there is no tool {self.tool_choice.function.name} in tools")
        if self._must_call and self.answer_schema() is not None:
            raise unfit("tool_choice", "an answer that must call a tool cannot have a JSON format as well")
        return self

    @property
    def field_names(self) -> dict[str, str]:
        names = super().field_names
        return {**names, "max_tokens": "max_completion_tokens"} if self.max_completion_tokens else names

    @property
    def num_new_tokens(self) -> int | None:
        """The limit on new tokens; None means the model's context."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_choices(self) -> int:
        return self.n

    @property
    def prompts(self) -> list[Prompt]:
        return [chat_prompt(self.messages, self.offered_tools(), self.template_values)]

    @property
    def tool_names(self) -> list[str]:
        return [tool.function.name for tool in self.offered_tools()]

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def template_values(self) -> JsonObject:
        """Return the values for the model's chat template. It may ignore those that OpenAI's API has for any model."""
        hints = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {**{name: hint for name, hint in hints.items() if hint}, **self.chat_template_kwargs}

    @property
    def _must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def offered_tools(self) -> list[Tool]:
        """Return the tools for the model's template; none if `tool_choice` is "none"."""
        return [] if self.tool_choice == "none" else self.tools

    def grammar(self) -> Grammar | None:
        """Return the grammar of the answer, or None. It includes calls that must be made and arguments that must fit a
        schema."""
        answer = self.answer_schema()
        offered = self._callable()
        are_free = not (self._must_call or answer is not None or any(tool.function.strict for tool in self.tools))
        if not offered or are_free:
            return super().grammar()
        # OpenAI's API calls a named function once
        may_repeat = self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)
        return calls_grammar(offered, may_talk=not self._must_call, may_repeat=may_repeat, answer=answer)

    def shown_stops(self) -> tuple[str, ...]:
        """Return the stop strings that are shown. They include the end of a call if only one call is allowed and no
        grammar ends the answer."""
        is_one = bool(self._callable()) and not self.parallel_tool_calls and self.grammar() is None
        return (*super().shown_stops(), *((CLOSING,) if is_one else ()))

    def _callable(self) -> dict[str, Schema]:
        """Return the argument schema of each tool that may be called, by name. If the arguments need not fit the tool's
        own schema, any JSON object is allowed."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        tools = [tool.function for tool in self.offered_tools()]
        return {
            tool.name: (tool.parameters if self._must_call or tool.strict else None) or {"type": "object"}
            for tool in tools
            if named in {None, tool.name}
        }
