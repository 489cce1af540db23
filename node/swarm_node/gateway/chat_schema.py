"""What a chat may ask for: messages, tools, probabilities; bounded field by field."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from swarm_node.gateway import bounds
from swarm_node.gateway.schema import MaxTokens, Neutral, SamplingRequest, Text, or_default, unfit, unsupported

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(BaseModel):
    type: Literal["text"]
    text: Text


class CalledFunction(BaseModel):
    name: FunctionName
    arguments: Text

    def decoded(self) -> Any:
        """Templates write arguments as JSON themselves. What is no JSON object stays as it was sent."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments
        return arguments if isinstance(arguments, dict) else self.arguments


class CallMessage(BaseModel):
    """A call that the assistant made earlier in the conversation."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def flat(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.decoded()}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=bounds.MAX_MESSAGE_PARTS)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[CallMessage], Field(max_length=bounds.MAX_TOOL_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _complete(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise unfit("messages", "only an assistant's message has tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise unfit("messages", "a tool's message needs a tool_call_id")
        if self.content is None and not self.tool_calls:
            raise unfit("messages", f"a message of role '{self.role}' needs content")
        return self

    def flat(self) -> dict[str, Any]:
        """As chat templates expect it: plain text, and 'developer', OpenAI's newer word, as 'system'."""
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        flat: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            flat["tool_calls"] = [call.flat() for call in self.tool_calls]
        if self.role == "tool":
            flat["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            flat["name"] = self.name
        return flat


class Function(BaseModel):
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class ChatRequest(SamplingRequest):
    neutral: ClassVar[Neutral] = {
        **SamplingRequest.neutral,
        "functions": ([],),
        "parallel_tool_calls": (True,),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=bounds.MAX_CHAT_MESSAGES)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: Annotated[bool, or_default(False)] = False
    top_logprobs: Annotated[int, or_default(0), Field(ge=0, le=bounds.MAX_CHAT_LOGPROBS)] = 0
    tools: Annotated[list[Tool], or_default([]), Field(max_length=bounds.MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Any = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise unfit("top_logprobs", "it needs logprobs to be true")
        if self.tool_choice not in (None, "none", "auto"):
            raise unsupported("tool_choice", "a model here cannot be made to call a tool; use auto or none")
        return self

    @property
    def num_new_tokens(self) -> int | None:
        """None: as many as are usual and fit into the model's context."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def offered_tools(self) -> list[dict[str, Any]]:
        """For the model's template; none if it shall call none."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools]
