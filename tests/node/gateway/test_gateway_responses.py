"""The Responses API: a request is answered like the chat request with the same meaning, in its own form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai as api
import pytest
from node.gateway.scripted_client import Hang, ScriptedClient, ScriptedLikely, ScriptedToken, converse
from openai import AsyncOpenAI
from openai.types import responses as shapes
from pydantic import BaseModel
from swarm.client.request import ContextExceeded
from swarm_node.gateway import http_limits
from swarm_node.gateway.choice import CLOSING, OPENING
from swarm_protocol.errors import ConfigError, PeerRefused, SessionError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
CHAT_WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
STRICT = {**WEATHER, "strict": True, "description": "tells the weather"}
CALL = OPENING + '\n{"name": "weather", "arguments": {"city": "Paris"}}\n' + CLOSING
HELLO = {"role": "user", "content": "hi"}
CALLED = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
CHAT_CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


def _format(kind: str, **more: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": kind, **more}}}


def _schema_format(**more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": more}}


def _said(*parts: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": part, "annotations": [], "logprobs": []} for part in parts]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def _script(*texts: str, reason: str = "stop") -> ScriptedClient:
    *most, last = texts
    return ScriptedClient(script=[*map(ScriptedToken, most), ScriptedToken(last, reason)])


async def _post(openai: AsyncOpenAI, body: dict[str, Any], path: str = "responses") -> Any:
    content = json.dumps({"model": "tiny", **body})
    headers = {"content-type": "application/json"}
    return await openai._client.post(f"{openai.base_url}{path}", content=content, headers=headers)


@pytest.mark.parametrize(
    ("request_", "chat"),
    [
        ({"input": "hi"}, {"messages": [HELLO]}),
        (
            {"input": [HELLO], "instructions": "Be short."},
            {"messages": [{"role": "system", "content": "Be short."}, HELLO]},
        ),
        (
            {
                "input": [
                    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
                    HELLO,
                    _said("hel", "lo"),
                    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "phase": "final_answer"},
                    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "status": None},
                    HELLO,
                ]
            },
            {
                "messages": [
                    {"role": "developer", "content": "Be short."},
                    HELLO,
                    {"role": "assistant", "content": "hello"},
                    {"role": "assistant", "content": "No."},
                    HELLO,
                ]
            },
        ),
        (
            {
                "input": [
                    HELLO,
                    _said("Let me see."),
                    {**CALLED, "id": "fc_1", "status": "completed", "caller": None, "namespace": None, "async": None},
                    shapes.ResponseFunctionToolCall.model_validate({**CALLED, "call_id": "c2"}).model_dump(),
                    _said(" Wait."),
                    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
                    {
                        "type": "function_call_output",
                        "call_id": "c2",
                        "output": [{"type": "input_text", "text": "sun"}],
                    },
                    CALLED,
                    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
                ],
                "tools": [WEATHER],
            },
            {
                "messages": [
                    HELLO,
                    {
                        "role": "assistant",
                        "content": "Let me see. Wait.",
                        "tool_calls": [CHAT_CALLED, {**CHAT_CALLED, "id": "c2"}],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                    {"role": "tool", "tool_call_id": "c2", "content": "sun"},
                    {"role": "assistant", "content": "", "tool_calls": [CHAT_CALLED]},
                    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                ],
                "tools": [CHAT_WEATHER],
            },
        ),
        ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": [CHAT_WEATHER], "tool_choice": "none"}),
        ({"tools": [WEATHER], "tool_choice": "required"}, {"tools": [CHAT_WEATHER], "tool_choice": "required"}),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, {"tools": [CHAT_WEATHER], "parallel_tool_calls": False}),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
            {"tools": [CHAT_WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        ({"tools": [STRICT]}, {"tools": [{"type": "function", "function": {**STRICT, "type": None}}]}),
        (_format("text"), {}),
        (_format("json_object"), {"response_format": {"type": "json_object"}}),
        (_format("json_schema", name="x", schema=SCHEMA), _schema_format(name="x", schema=SCHEMA)),
        ({"max_output_tokens": 7}, {"max_completion_tokens": 7}),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"top_k": 5, "seed": 3, "stop": "x"}, {"top_k": 5, "seed": 3, "stop": "x"}),
        ({"chat_template_kwargs": {"mood": "good"}}, {"chat_template_kwargs": {"mood": "good"}}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"verbosity": "low"}}, {"verbosity": "low"}),
    ],
)
def test_request_asks_for_the_same_as_a_chat(request_: dict[str, Any], chat: dict[str, Any]) -> None:
    client = ScriptedClient()
    for tool in chat.get("tools", ()):
        tool["function"].pop("type", None)

    async def conversation(openai: AsyncOpenAI) -> None:
        for path, body in (
            ("responses", {"input": "hi", **request_}),
            ("chat/completions", {"messages": [HELLO], **chat}),
        ):
            answer = await _post(openai, {"seed": 1, **body}, path)
            assert answer.status_code == 200, answer.text

    converse(client, conversation)
    of_response, of_chat = client.asked
    assert of_response == of_chat


def test_fields_without_an_effect_are_accepted_and_the_answer_says_that_nothing_is_stored() -> None:
    client = ScriptedClient()
    more = {
        "background": False,
        "client_metadata": {"session": "s"},
        "include": ["reasoning.encrypted_content"],
        "max_tool_calls": 3,
        "metadata": {"run": "7"},
        "previous_response_id": None,
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "implicit"},
        "prompt_cache_retention": "24h",
        "reasoning": {"summary": "auto", "context": "auto"},
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": True,
        "text": None,
        "tools": None,
        "truncation": "disabled",
        "user": "someone",
    }

    async def conversation(openai: AsyncOpenAI) -> None:
        plain, answer = [(await _post(openai, {"input": "hi", "seed": 1, **each})).json() for each in ({}, more)]
        assert answer["store"] is False
        assert answer["service_tier"] == "default"
        echoed = {"metadata": {"run": "7"}, "user": "someone", "prompt_cache_key": "k", "safety_identifier": "s"}
        assert {name: answer[name] for name in echoed} == echoed
        assert plain.keys() == answer.keys()

    converse(client, conversation)
    assert client.asked[0] == client.asked[1]


@pytest.mark.parametrize("stream", [False, True])
def test_answer_echoes_the_options_that_were_used(stream: bool) -> None:
    client = ScriptedClient(own={"top_p": 0.8})

    async def conversation(openai: AsyncOpenAI) -> None:
        for asked, used in (({}, (1, 0.8)), ({"temperature": 0.5, "top_p": 0.25}, (0.5, 0.25))):
            answer = await openai.responses.create(model="tiny", input="hi", stream=stream, **asked)
            if isinstance(answer, api.AsyncStream):
                objects = [event.response async for event in answer if hasattr(event, "response")]
            else:
                objects = [answer]
            assert len(objects) == (3 if stream else 1)
            assert {(each.temperature, each.top_p) for each in objects} == {used}

    converse(client, conversation)


class City(BaseModel):
    city: str


def test_answer_is_parsed_by_openais_client() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        parsed = await openai.responses.parse(model="tiny", input="Where?", text_format=City)
        assert parsed.output_parsed == City(city="Rome")
        assert parsed.id.startswith("resp_")
        assert parsed.status == "completed"
        assert parsed.usage is not None
        assert (parsed.usage.input_tokens, parsed.usage.output_tokens, parsed.usage.total_tokens) == (3, 1, 4)
        assert parsed.usage.input_tokens_details.cached_tokens == 2
        await openai.responses.create(model="tiny", input=[HELLO, *parsed.output, HELLO])

    client = _script('{"city": "Rome"}')
    converse(client, conversation)
    assert client.asked[0].sampling.grammar is not None
    assert client.asked[1].prompt.messages == [HELLO, {"role": "assistant", "content": '{"city": "Rome"}'}, HELLO]


@pytest.mark.parametrize(
    ("client", "kinds", "status"),
    [
        (_script("hel", "lo"), ["message"], "completed"),
        (_script("hel", "lo", reason="length"), ["message"], "incomplete"),
        (_script(""), ["message"], "completed"),
        (
            _script("Let me see.\n", CALL[:20], CALL[20:], "\n", CALL),
            ["message", "function_call", "function_call"],
            "completed",
        ),
        (_script(CALL), ["function_call"], "completed"),
    ],
)
def test_streamed_answer_is_the_whole_one(client: ScriptedClient, kinds: list[str], status: str) -> None:
    """The client's helper checks the order of the events, and that they name their items."""
    asked: Any = {"model": "tiny", "input": "hi", "tools": [WEATHER]}

    async def conversation(openai: AsyncOpenAI) -> None:
        whole = await openai.responses.create(**asked)
        assert [item.type for item in whole.output] == kinds
        assert whole.status == status
        async with openai.responses.stream(**asked) as stream:
            checked = [event.type async for event in stream]
        events = [event async for event in await openai.responses.create(**asked, stream=True)]
        assert [event.type for event in events] == checked
        assert [event.sequence_number for event in events] == [*range(len(events))]
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == whole.output_text
        last = events[-1]
        assert isinstance(last, shapes.ResponseCompletedEvent | shapes.ResponseIncompleteEvent)
        assert _without_ids(last.response) == _without_ids(whole)

    converse(client, conversation)


def _without_ids(response: shapes.Response) -> dict[str, Any]:
    made = response.to_dict()
    items: Any = made["output"]
    for item in [made, *items]:
        item.pop("id")
        item.pop("call_id", None)
        item.pop("created_at", None)
    return made


def test_events_have_their_names_and_no_other_end() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        lines = (await _post(openai, {"input": "hi", "stream": True})).text.splitlines()
        names = [line.removeprefix("event: ") for line in lines[::3]]
        assert names == [json.loads(line.removeprefix("data: "))["type"] for line in lines[1::3]]
        assert names == [
            *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
            *["response.output_text.delta"] * 3,
            *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
            "response.completed",
        ]

    converse(ScriptedClient(), conversation)


def test_limit_makes_the_answer_incomplete() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai.responses.create(model="tiny", input="hi", max_output_tokens=2)
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        [message] = answer.output
        assert isinstance(message, shapes.ResponseOutputMessage)
        assert message.status == "incomplete"

    converse(_script("hel", "lo", reason="length"), conversation)


def test_call_is_answered_in_a_second_turn() -> None:
    client = ScriptedClient(scripts=[_script("Wait.", CALL).script, _script("Sunny.").script])

    async def conversation(openai: AsyncOpenAI) -> None:
        tool = api.pydantic_function_tool(City, name="weather")["function"]
        tools: Any = [{"type": "function", **tool}]
        first = await openai.responses.parse(model="tiny", input="hi", tools=tools)
        call = first.output[1]
        assert isinstance(call, shapes.ParsedResponseFunctionToolCall)
        assert call.parsed_arguments == {"city": "Paris"}
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        second = await openai.responses.create(model="tiny", input=[HELLO, *first.output, result], tools=tools)
        assert second.output_text == "Sunny."

    converse(client, conversation)
    _, said, result = client.asked[1].prompt.messages
    assert said["content"] == "Wait."
    assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert result == {"role": "tool", "content": "sunny", "tool_call_id": said["tool_calls"][0]["id"]}


def test_probabilities_are_in_the_text_and_its_events() -> None:
    likely = (ScriptedLikely(b"a", -0.5), ScriptedLikely(b"b", -1.0))
    script = [ScriptedToken("a", None, b"a", -0.5, likely), ScriptedToken("b", "stop", b"b", -1.0, likely)]

    async def conversation(openai: AsyncOpenAI) -> None:
        asked: Any = {"input": "hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
        answer = await openai.responses.create(model="tiny", **asked)
        [message] = answer.output
        assert isinstance(message, shapes.ResponseOutputMessage)
        [text] = message.content
        assert isinstance(text, shapes.ResponseOutputText)
        assert text.logprobs is not None
        assert [(each.token, each.logprob, each.bytes) for each in text.logprobs] == [
            ("a", -0.5, [97]),
            ("b", -1.0, [98]),
        ]
        assert [other.token for other in text.logprobs[0].top_logprobs] == ["a", "b"]
        stream = await openai.responses.create(model="tiny", stream=True, **asked)
        deltas = [event async for event in stream if event.type == "response.output_text.delta"]
        assert [[each.token for each in delta.logprobs] for delta in deltas] == [["a"], ["b"]]

    converse(ScriptedClient(script=script), conversation)


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (SessionError("nobody is left"), "server_error"),
        (PeerRefused("full", retry_after_s=2), "rate_limit_exceeded"),
    ],
)
def test_failure_after_the_first_token_is_raised_and_fails_the_response(failure: Exception, code: str) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        stream = await openai.responses.create(model="tiny", input="hi", stream=True)
        with pytest.raises(api.APIError, match=str(failure)):
            _ = [event async for event in stream]
        lines = (await _post(openai, {"input": "hi", "stream": True})).text.splitlines()
        error, failed = [json.loads(line.removeprefix("data: ")) for line in lines[1::3]][-2:]
        assert (error["type"], error["message"], error["param"]) == ("error", str(failure), None)
        assert failed["type"] == "response.failed"
        assert failed["response"]["status"] == "failed"
        assert failed["response"]["error"] == {"code": code, "message": str(failure)}
        assert failed["sequence_number"] == error["sequence_number"] + 1

    converse(ScriptedClient(script=[ScriptedToken("a"), failure]), conversation)


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_disconnects_frees_the_generation(stream: bool) -> None:
    client = ScriptedClient(script=[ScriptedToken("a"), Hang()])

    async def read_all(openai: AsyncOpenAI) -> None:
        answer = await openai.responses.create(model="tiny", input="hi", stream=stream)
        if isinstance(answer, api.AsyncStream):
            _ = [event async for event in answer]

    async def conversation(openai: AsyncOpenAI) -> None:
        asking = asyncio.create_task(read_all(openai))
        await client.reached.wait()
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(30):
            while client.num_open:
                await asyncio.sleep(0.01)

    converse(client, conversation)


def _refusals(bodies: list[dict[str, Any]], client: ScriptedClient | None = None) -> list[dict[str, Any]]:
    errors: list[dict[str, Any]] = []

    async def conversation(openai: AsyncOpenAI) -> None:
        for body in bodies:
            answer = await _post(openai, {"input": "hi", **body})
            assert answer.status_code == 400, answer.text
            errors.append(answer.json()["error"])

    converse(client or ScriptedClient(), conversation)
    return errors


WHOLE = "send the whole conversation as input in its place"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"background": True}, "background", "send stream: true in its place"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", WHOLE),
    ({"conversation": {"id": "conv_1"}}, "conversation", WHOLE),
    ({"prompt": {"id": "p"}}, "prompt", "send its text as instructions and input"),
    ({"truncation": "auto"}, "truncation", "leave it out"),
    ({"service_tier": "priority"}, "service_tier", "leave it out"),
    ({"n": 2}, "n", "unknown parameter 'n': leave it out"),
    ({"max_tokens": 5}, "max_tokens", "did you mean max_output_tokens?"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "did you mean max_output_tokens?"),
    ({"messages": [HELLO]}, "messages", "did you mean input?"),
    ({"response_format": {}}, "response_format", "did you mean text.format?"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "did you mean reasoning.effort?"),
    ({"metadata": {"k" * 65: ""}}, "metadata", "each name must have at most 64 characters"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.function", "beside the type"),
    ({"input": 5}, "input", "it is 5, and not a string or a list"),
    ({"input": []}, "input", "it must not be empty"),
    ({"input": [{"type": "reasoning"}]}, "input", "it must not be empty"),
    ({"input": [HELLO, RESULT]}, "input", "it has the result of the call 'c1', and not the call before it"),
    ({"input": [RESULT, CALLED]}, "input", "and not the call before it"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type", "send the items themselves"),
    ({"input": [HELLO, {"type": "computer_call"}]}, "input.1.type", "it is not one of 'message', 'function_call'"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "it is 'tool', and not 'user'"),
    ({"input": [{"role": "user"}]}, "input.0.content", "it is missing"),
    ({"input": [{**HELLO, "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "'input_image', and not"),
    ({"input": [{**CALLED, "name": "no name"}]}, "input.0.name", "it does not match"),
    (
        {"tools": [{"type": "web_search", "external_web_access": False}]},
        "tools.0.type",
        "it is 'web_search', and not 'function'",
    ),
    ({"tools": [{**WEATHER, "name": ""}]}, "tools.0.name", "it does not match"),
    ({"tool_choice": "required"}, "tool_choice", "describe them in tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "and not 'function'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "there is no tool f"),
    (
        {"tools": [WEATHER], "tool_choice": "required", **_format("json_object")},
        "tool_choice",
        "cannot have a JSON format",
    ),
    (_format("grammar"), "text.format.type", "it is 'grammar', and not one of"),
    (_format("json_schema", schema={}), "text.format.name", "it is missing"),
    ({**_format("json_object"), "min_tokens": 3}, "text.format", "min_tokens"),
    ({"include": ["everything"]}, "include.0", "it is 'everything', and not"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "it is 'huge', and not"),
    ({"text": {"verbosity": 3}}, "text.verbosity", "it is 3, and not"),
    ({"top_logprobs": 21}, "top_logprobs", "it must be at most 20"),
    ({"max_output_tokens": 0}, "max_output_tokens", "it must be at least 1"),
    ({"stream_options": {}}, "stream_options", "requires stream to be true"),
    ({"metadata": {"a": 1}}, "metadata.a", "it is 1, and not a string"),
]


def test_what_is_wrong_is_said_in_one_line_that_names_the_field() -> None:
    errors = _refusals([body for body, _, _ in REFUSED])
    for (body, param, says), error in zip(REFUSED, errors, strict=True):
        assert error["param"] == param, (body, error)
        assert says in error["message"], (body, error)
        assert "\n" not in error["message"]


def test_what_the_answer_cannot_repeat_is_refused_before_it_is_computed() -> None:
    client, statuses = ScriptedClient(), []

    async def conversation(openai: AsyncOpenAI) -> None:
        for depth in range(240, 260):
            deep: Any = json.loads("[" * depth + "]" * depth)
            for field, value in {
                "tools": {"tools": [{**WEATHER, "parameters": {"enum": deep}}]},
                "text.format": _format("json_schema", name="x", schema={"enum": deep}),
            }.items():
                num_asked = len(client.asked)
                answer = await _post(openai, {"input": "hi", "stream": True, **value})
                statuses.append(answer.status_code)
                assert answer.status_code == 200 or answer.json()["error"]["param"] == field
                assert (answer.status_code == 200) == (len(client.asked) > num_asked)

    converse(client, conversation)
    assert set(statuses) == {200, 400}
    [error] = _refusals([{"tools": [{**WEATHER, "parameters": {"enum": ["\ud800"]}}]}])
    assert error["param"] == "tools"


def test_sizes_are_bounded() -> None:
    most = http_limits.MAX_METADATA
    call = {**CALLED, "arguments": json.dumps([[]] * (http_limits.MAX_HTTP_VALUES // 2))}
    bodies = {
        "input": [
            {"input": [HELLO] * (http_limits.MAX_RESPONSES_ITEMS + 1)},
            {"input": [HELLO] * (http_limits.MAX_CHAT_MESSAGES + 1)},
            {"input": [CALLED] * (http_limits.MAX_TOOL_CALLS + 1)},
            {"input": [call, call, call]},
        ],
        "input.0.content": [{"input": [_said(*["x"] * (http_limits.MAX_MESSAGE_PARTS + 1))]}],
        "tools": [{"tools": [WEATHER] * (http_limits.MAX_TOOLS + 1)}],
        "metadata": [{"metadata": {str(number): "" for number in range(most + 1)}}, {"metadata": {"x" * 10**6: ""}}],
    }
    for param, wrong in bodies.items():
        for error in _refusals(wrong):
            assert error["param"] == param, error
            assert "at most" in error["message"] or "over" in error["message"], error
            assert len(error["message"]) < 200


def test_failure_of_a_field_names_it_as_the_client_sent_it() -> None:
    for setting, field in {"prompt": "input", "max_tokens": "max_output_tokens", "grammar": "text.format"}.items():
        kind = ContextExceeded if setting == "prompt" else ConfigError
        client = ScriptedClient(script=[kind("no", field=setting)])
        [error] = _refusals([{"max_output_tokens": 5, **_format("json_object")}], client)
        assert error["param"] == field


def test_stored_responses_are_told_not_to_exist() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.NotFoundError, match="responses are not stored"):
            await openai.responses.retrieve("resp_1")
        with pytest.raises(api.NotFoundError, match="responses are not stored"):
            await openai.responses.delete("resp_1")
        with pytest.raises(api.NotFoundError, match="responses are not stored"):
            await openai.responses.cancel("resp_1")
        with pytest.raises(api.NotFoundError, match="serves a part of OpenAI's API"):
            await openai.responses.compact(model="tiny", input="hi")

    converse(ScriptedClient(), conversation)
