"""Builds an answer in the form of OpenAI's Responses API, whole and as events.

Pure. An answer is a list of items: messages, each with one text, and function calls. An event names the item that it
changes, and all events of a stream are numbered.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, get_args

from openai.types import CompletionUsage
from openai.types import responses as api
from openai.types.responses.tool_choice_function import ToolChoiceFunction
from openai.types.responses.tool_choice_options import ToolChoiceOptions
from pydantic import BaseModel

from swarm_node.gateway.choice import Delta, FinishedChoice, FinishReason, ToolCall
from swarm_node.gateway.responses import Json, ResponseHead, scores, streamed
from swarm_node.http.http_error import HttpError

EVENTS: dict[str, type[BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in (
        api.ResponseOutputItemAddedEvent,
        api.ResponseContentPartAddedEvent,
        api.ResponseTextDeltaEvent,
        api.ResponseTextDoneEvent,
        api.ResponseContentPartDoneEvent,
        api.ResponseFunctionCallArgumentsDeltaEvent,
        api.ResponseFunctionCallArgumentsDoneEvent,
        api.ResponseOutputItemDoneEvent,
        api.ResponseErrorEvent,
    )
}
"""OpenAI's events by their names, except those that hold the whole response."""
CONSTANT: Json = {
    "background": False,
    "error": None,
    "incomplete_details": None,
    "object": "response",
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
    "usage": None,
}
"""The fields that are the same in all answers, or as long as an answer is not complete."""


class ResponseObject(api.Response):
    """OpenAI's response object, with the kinds of items and tools that this gateway has."""

    created_at: int
    instructions: str | None = None
    output: list[api.ResponseOutputMessage | api.ResponseFunctionToolCall]  # type: ignore[assignment]
    tool_choice: ToolChoiceOptions | ToolChoiceFunction
    tools: list[api.FunctionTool]  # type: ignore[assignment]


class ResponseEvent(BaseModel):
    """An event that holds the whole response, such as `response.completed`."""

    type: str
    sequence_number: int
    response: ResponseObject


RESPONSE = streamed(ResponseObject, "ResponseStreamEvent")


@dataclass(slots=True)
class ResponsesBuilder:
    """Builds the objects of one answer, whole and as events. `echoed` are the fields that it repeats."""

    last_event: ClassVar[bytes] = b""

    head: ResponseHead
    echoed: Json
    _num_events: int = 0
    _reason: FinishReason = "stop"
    _output: list[Json] = field(default_factory=list)  # the items that are complete
    _message_id: str = ""  # of the message that is open
    _texts: list[str] = field(default_factory=list)
    _scores: list[Json] = field(default_factory=list)

    def begin(self, trace: Json) -> None:
        """Echo the values with which tokens are drawn, which are the model's own where the request left them out."""
        self.echoed |= {name: trace["sampling"][name] for name in ("temperature", "top_p")}

    def whole(self, choices: Sequence[FinishedChoice], usage: CompletionUsage) -> ResponseObject:
        [one] = choices
        if one.text:
            self.next(0, Delta(text=one.text, tokens=one.tokens))
        for call in one.calls:
            self.next(0, Delta(call=call))
        self.last(0, one.finish_reason)
        return self._answer(usage)

    def first(self, _index: int) -> list[BaseModel]:
        begun = {"response": self._object("in_progress", {})}
        return [self._event("response.created", begun), self._event("response.in_progress", begun)]

    def next(self, _index: int, delta: Delta) -> list[BaseModel]:
        if delta.call:
            return [*self._close(), *self._call(delta.call)]
        events = [] if self._message_id else self._open()
        made = scores(delta.tokens) if self.head.with_logprobs else []
        self._texts.append(delta.text)
        self._scores += made
        said = {**self._place(), "content_index": 0, "delta": delta.text, "logprobs": made}
        return [*events, self._event("response.output_text.delta", said)]

    def last(self, _index: int, finish_reason: FinishReason) -> list[BaseModel]:
        self._reason = finish_reason
        events = [] if self._message_id or self._output else self._open()
        return [*events, *self._close()]

    def ended(self, usage: CompletionUsage) -> list[BaseModel]:
        answer = self._answer(usage)
        return [self._event(f"response.{answer.status}", {"response": answer})]

    def failed(self, failure: HttpError) -> list[BaseModel]:
        """Return OpenAI's error event, which its clients raise, and the failed response, which other clients read."""
        error = failure.body["error"]
        code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
        failed = self._object("failed", {"error": {"code": code, "message": failure.message}})
        return [self._event("error", {**error, "error": error}), self._event("response.failed", {"response": failed})]

    def _open(self) -> list[BaseModel]:
        self._message_id = f"msg_{secrets.token_hex(12)}"
        return [
            self._event("response.output_item.added", {**self._place(), "item": self._message("in_progress")}),
            self._event("response.content_part.added", {**self._place(), "content_index": 0, "part": self._part()}),
        ]

    def _close(self) -> list[BaseModel]:
        """Return the events that complete the open message, if there is one."""
        if not self._message_id:
            return []
        part, place = self._part(), self._place()
        said = {**place, "content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
        item = self._message("incomplete" if self._reason == "length" else "completed", part)
        events = [
            self._event("response.output_text.done", said),
            self._event("response.content_part.done", {**place, "content_index": 0, "part": part}),
            self._event("response.output_item.done", {**place, "item": item}),
        ]
        self._output.append(item)
        self._message_id = ""
        self._texts.clear()
        self._scores = []
        return events

    def _call(self, call: ToolCall) -> list[BaseModel]:
        begun = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": call.id, "name": call.name}
        item = {**begun, "arguments": call.arguments, "status": "completed"}
        place = {"output_index": len(self._output), "item_id": begun["id"]}
        self._output.append(item)
        added = {**begun, "arguments": "", "status": "in_progress"}
        return [
            self._event("response.output_item.added", {**place, "item": added}),
            self._event("response.function_call_arguments.delta", {**place, "delta": call.arguments}),
            self._event("response.function_call_arguments.done", {**place, "arguments": call.arguments}),
            self._event("response.output_item.done", {**place, "item": item}),
        ]

    def _place(self) -> Json:
        return {"output_index": len(self._output), "item_id": self._message_id}

    def _message(self, status: str, *parts: Json) -> Json:
        message = {"type": "message", "id": self._message_id, "role": "assistant"}
        return {**message, "status": status, "content": list(parts)}

    def _part(self) -> Json:
        return {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": self._scores}

    def _answer(self, usage: CompletionUsage) -> ResponseObject:
        details = usage.prompt_tokens_details
        used = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": (details and details.cached_tokens) or 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }
        if self._reason == "length":
            return self._object("incomplete", {"incomplete_details": {"reason": "max_output_tokens"}, "usage": used})
        return self._object("completed", {"usage": used})

    def _object(self, status: str, more: Json) -> ResponseObject:
        own = {"id": self.head.id, "model": self.head.model, "created_at": self.head.created, "status": status}
        return ResponseObject.model_validate({**CONSTANT, **self.echoed, **own, **more, "output": self._output})

    def _event(self, name: str, fields: Json) -> BaseModel:
        numbered = {**fields, "type": name, "sequence_number": self._num_events}
        self._num_events += 1
        return EVENTS.get(name, ResponseEvent).model_validate(numbered)
