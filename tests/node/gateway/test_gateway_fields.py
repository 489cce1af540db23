"""Each field is honoured or refused by its name: none is accepted with a 200 and without an effect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai as api
import pytest
from node.gateway.scripted_client import ScriptedClient, ScriptedToken, converse
from openai import AsyncOpenAI
from pydantic import ValidationError
from swarm.client.request import schema_grammar
from swarm.serving.sampling.sampling import MAX_STOPS, OWN_DEFAULTS, Sampling
from swarm_node.gateway import http_limits
from swarm_node.gateway.api_errors import MAX_TOLD
from swarm_node.gateway.chat_schema import ChatRequest
from swarm_node.gateway.completion_schema import CompletionRequest
from swarm_node.gateway.request_schema import StrictBody
from swarm_node.gateway.responses_schema import ResponsesRequest
from swarm_node.gateway.texts import DetokenizeRequest, EmbeddingRequest, TokenizeChat
from swarm_protocol import limits

HELLO = [{"role": "user", "content": "hi"}]
PLAIN: dict[str, dict[str, Any]] = {
    "/completions": {"model": "tiny", "prompt": "hi", "seed": 1},
    "/chat/completions": {"model": "tiny", "messages": HELLO, "seed": 1},
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}

REFUSED: dict[str, list[tuple[str, Any]]] = {
    "both": [
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("guided_choice", ["a", "b"]),
        ("guided_grammar", "x"),
        ("guided_json", {}),
        ("guided_regex", "x"),
        ("structured_outputs", {"json": {}}),
        ("prompt_logprobs", 1),
        ("return_token_ids", True),
        ("truncate_prompt_tokens", 5),
        ("use_beam_search", True),
        ("length_penalty", 2.0),
        ("best_of", 3),
        ("skip_special_tokens", False),
        ("logits_processors", ["x"]),
        ("service_tier", "priority"),
    ],
    "/completions": [("suffix", "x"), ("add_special_tokens", False)],
    "/chat/completions": [
        ("add_generation_prompt", False),
        ("chat_template", "x"),
        ("continue_final_message", True),
        ("documents", [{}]),
        ("echo", True),
        ("echo", 1),
        ("functions", [{}]),
        ("function_call", "auto"),
        ("modalities", ["audio"]),
        ("web_search_options", {}),
    ],
}


async def _sent(openai: AsyncOpenAI, path: str, more: dict[str, Any]) -> httpx.Response:
    body = json.dumps({**PLAIN[path], **more})  # httpx's own JSON cannot hold half of a character
    headers = {"content-type": "application/json"}
    response: httpx.Response = await openai._client.post(f"{openai.base_url}{path[1:]}", content=body, headers=headers)
    return response


def _errors(path: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the error for each body, and check that the swarm got no request."""
    errors = []
    client = ScriptedClient()

    async def conversation(openai: AsyncOpenAI) -> None:
        for body in bodies:
            response = await _sent(openai, path, body)
            assert response.status_code == 400, (body, response.text)
            errors.append(response.json()["error"])

    converse(client, conversation)
    assert not client.asked
    return errors


def _asked(path: str, more: dict[str, Any]) -> Any:
    """Return the request that reaches the swarm's client."""
    client = ScriptedClient()

    async def conversation(openai: AsyncOpenAI) -> None:
        response = await _sent(openai, path, more)
        assert response.status_code == 200, response.text

    converse(client, conversation)
    return client.asked[0]


@pytest.mark.parametrize("path", PLAIN)
def test_field_that_is_not_offered_is_refused_by_name(path: str) -> None:
    fields = [*REFUSED["both"], *REFUSED[path]]
    for (name, _), error in zip(fields, _errors(path, [{name: value} for name, value in fields]), strict=True):
        assert (error["code"], error["param"], error["type"]) == (
            "unsupported_parameter",
            name,
            "invalid_request_error",
        )
        assert f"'{name}' is not supported" in error["message"]


def test_older_field_is_refused_with_the_field_that_has_replaced_it() -> None:
    bodies = [{"functions": [{}]}, {"function_call": "auto"}, {"guided_json": {}}, {"tool_choice": "required"}]
    messages = [error["message"] for error in _errors("/chat/completions", bodies)]
    ways = (
        "send tools in its place",
        "send tool_choice in its",
        "send response_format in its",
        "describe them in tools",
    )
    assert all(way in message for way, message in zip(ways, messages, strict=True)), messages


def test_field_of_another_endpoint_is_refused_with_its_name_here() -> None:
    text = {"messages": "prompt", "instructions": "prompt", "max_completion_tokens": "max_tokens"}
    chat = {
        "input": "messages",
        "instructions": "messages",
        "text": "response_format",
        "max_output_tokens": "max_completion_tokens",
        "reasoning": "reasoning_effort",
        "enable_thinking": "chat_template_kwargs",
        "extra_body": "its fields beside the others",
        "n_predict": "max_tokens",
    }
    for path, names in (("/completions", text), ("/chat/completions", chat)):
        for (name, here), error in zip(names.items(), _errors(path, [{name: 1} for name in names]), strict=True):
            assert error["message"] == f"unknown parameter '{name}': did you mean {here}?"


def test_schema_beside_the_type_json_object_is_refused_with_the_type_for_it() -> None:
    """llama.cpp's server takes it there."""
    [error] = _errors("/chat/completions", [{"response_format": {"type": "json_object", "schema": SCHEMA}}])
    assert error["message"] == "unknown parameter 'response_format.schema': did you mean the type json_schema?"


def test_field_is_not_suggested_for_one_of_another_meaning() -> None:
    for error in _errors("/completions", [{"reasoning_effort": "low"}, {"system": "be brief"}]):
        assert error["message"].endswith(": leave it out")


@pytest.mark.parametrize("path", PLAIN)
def test_unknown_field_is_refused_by_name_wherever_it_is(path: str) -> None:
    nested_body = {"stream_options": {"include_usage": True, "foo": 1}}
    [plain, nested, huge] = _errors(path, [{"temprature": 0.5}, nested_body, {"x" * 10**6: 1}])
    assert (plain["code"], plain["param"]) == ("unknown_parameter", "temprature")
    assert (nested["code"], nested["param"]) == ("unknown_parameter", "stream_options.foo")
    assert plain["message"] == "unknown parameter 'temprature': did you mean temperature?"
    assert nested["message"] == "unknown parameter 'stream_options.foo': leave it out"
    assert len(huge["message"]) < 200


def test_unknown_field_of_a_message_is_refused_and_an_echoed_answer_is_not() -> None:
    echoed = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": [{"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}],
    }
    path = "/chat/completions"
    assert len(_asked(path, {"messages": [*HELLO, echoed]}).prompt.messages) == 2
    [image, refusal] = _errors(
        path, [{"messages": [{**HELLO[0], "images": []}]}, {"messages": [{**echoed, "refusal": "no"}]}]
    )
    assert image["param"] == "messages.0.images"
    assert refusal["param"] == "messages.0.refusal"


@pytest.mark.parametrize("path", PLAIN)
def test_fields_without_an_effect_on_the_answer_are_accepted(path: str) -> None:
    more = {
        "user": "someone",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "store": True,
        "metadata": {"a": "b"},
        "prompt_cache_retention": "24h",
        "service_tier": "auto",
        "stream_options": None,
        "best_of": 1,
        "echo": False,
        "length_penalty": 1,
        "use_beam_search": False,
        "guided_json": None,
        "top_k": -1,
        "logit_bias": None,
        "stop_token_ids": None,
        "response_format": {"type": "text"},
    }
    assert _asked(path, more).sampling == Sampling(temperature=1.0, seed=1)


@pytest.mark.parametrize("path", PLAIN)
def test_fields_that_are_not_known_do_not_hide_what_is_wrong_with_others(path: str) -> None:
    [error, many, large] = _errors(
        path,
        [
            {"top_p": "x", "foo": 1, "temprature": 1, "guided_regex": "x"},
            {"top_p": "x", **{f"unknown{number}": 1 for number in range(9)}},
            {"top_p": "x", "foo": 1, "bar": 1, "user": "x" * http_limits.SMALL_HTTP_BODY_BYTES},
        ],
    )
    assert (error["code"], error["param"]) == ("unsupported_parameter", "guided_regex")
    assert error["message"] == (
        "'guided_regex' is not supported by this gateway: leave it out; "
        "unknown parameter 'foo': leave it out; "
        "unknown parameter 'temprature': did you mean temperature?; "
        "top_p: it is 'x', and not a number"
    )
    assert many["message"].count("unknown parameter") == MAX_TOLD
    assert "bar" not in large["message"]  # to look further takes too long


@pytest.mark.parametrize("path", PLAIN)
def test_all_wrong_values_are_told_together(path: str) -> None:
    [two, many] = _errors(
        path,
        [
            {"top_p": "x", "temperature": 3},
            {"top_p": "x", "temperature": 3, "seed": "x", "stop": [5], "min_p": 2},
        ],
    )
    assert (two["code"], two["param"]) == ("invalid_value", "temperature")
    assert two["message"] == "temperature: it must be at most 2; top_p: it is 'x', and not a number"
    assert many["message"].count("; ") == MAX_TOLD - 1


def test_body_in_chunks_is_looked_through_once_whatever_length_it_declares() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            yield json.dumps({**PLAIN["/completions"], "foo": 1, "bar": 1}).encode()

        headers = {"content-type": "application/json", "content-length": "9", "transfer-encoding": "chunked"}
        url = f"{openai.base_url}completions"
        error = (await openai._client.post(url, content=chunks(), headers=headers)).json()["error"]
        assert error["message"] == "unknown parameter 'foo': leave it out"

    converse(ScriptedClient(), conversation)


@pytest.mark.parametrize("path", PLAIN)
def test_options_that_are_left_out_or_null_are_left_to_the_model(path: str) -> None:
    assert set(_asked(path, {"temperature": None}).left_out) == set(OWN_DEFAULTS)
    asked = _asked(path, {"temperature": 0, "top_p": 1, "top_k": -1, "repetition_penalty": 1})
    assert (asked.left_out, asked.sampling) == (["min_p"], Sampling(seed=1))


@pytest.mark.parametrize("path", PLAIN)
@pytest.mark.parametrize(
    ("sent", "drawn"),
    [
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"presence_penalty": 1, "frequency_penalty": -2}, {"presence_penalty": 1.0, "frequency_penalty": -2.0}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"logit_bias": {"5": -100, "7": 2.5}}, {"logit_bias": ((5, -100.0), (7, 2.5))}),
        ({"stop_token_ids": [5, 7]}, {"stop_token_ids": (5, 7)}),
        ({"min_tokens": 3, "ignore_eos": True}, {"min_tokens": 3, "ignore_eos": True}),
        ({"stop": "x", "include_stop_str_in_output": True}, {"stop_after": ("x",)}),
        ({"response_format": {"type": "json_object"}}, {"grammar": schema_grammar({"type": "object"})}),
        ({"response_format": AS_SCHEMA}, {"grammar": schema_grammar(SCHEMA)}),
    ],
    ids=",".join,
)
def test_sampling_field_reaches_the_swarm_s_client(path: str, sent: dict[str, Any], drawn: dict[str, Any]) -> None:
    assert _asked(path, sent).sampling == Sampling(temperature=1.0, seed=1, **drawn)


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {str(n): 1 for n in range(2000)}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"min_tokens": "3"}, "min_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": "x" * 70_000}}}},
            "response_format",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sampling_field_out_of_its_bounds_is_named(sent: dict[str, Any], param: str) -> None:
    [error] = _errors("/completions", [sent])
    assert error["param"].startswith(param), error
    assert len(error["message"]) < 500


@pytest.mark.parametrize("key", ["a", "-1", "01", "1.0", "5\n", "1000000", ""])
def test_bias_with_an_invalid_token_id_is_refused_without_showing_a_pattern(key: str) -> None:
    [error] = _errors("/completions", [{"logit_bias": {key: 1}}])
    assert error["message"].endswith(f"it is {key!r}, and not a token id, such as 50256"), error
    assert error["code"] == "invalid_value"


# --- tools ------------------------------------------------------------------------------------------------------------


def _chat(**more: Any) -> Any:
    return _asked("/chat/completions", {"tools": [WEATHER, CLOCK], **more})


def test_optional_tools_need_no_grammar() -> None:
    for more in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        assert _chat(**more).sampling.grammar is None
    assert _chat(tool_choice="none", parallel_tool_calls=False).sampling.stop_after == ()


def test_forced_tool_choice_becomes_a_grammar_of_calls() -> None:
    named = _chat(tool_choice={"type": "function", "function": {"name": "weather"}}).sampling.grammar
    assert named.kind == "lark"
    assert "weather" in named.text
    assert "clock" not in named.text
    assert "*" not in named.text.splitlines()[0], "a named function is called once"
    required = _chat(tool_choice="required").sampling.grammar
    assert "clock" in required.text
    assert required.text.splitlines()[0].endswith(")*")
    assert "*" not in _chat(tool_choice="required", parallel_tool_calls=False).sampling.grammar.text.splitlines()[0]


def test_strict_tool_becomes_a_grammar_when_it_may_be_called() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    free = _asked("/chat/completions", {"tools": [strict, CLOCK]}).sampling.grammar
    assert free.text.startswith("start: (opened call)* TEXT")
    assert _asked("/chat/completions", {"tools": [strict], "tool_choice": "none"}).sampling.grammar is None
    both = _asked("/chat/completions", {"tools": [CLOCK], "response_format": {"type": "json_object"}}).sampling.grammar
    assert "| answer" in both.text


def test_one_call_ends_the_answer_without_parallel_tool_calls() -> None:
    assert _chat(parallel_tool_calls=False).sampling.stop_after == ("</tool_call>",)
    assert _chat(parallel_tool_calls=True).sampling.stop_after == ()
    assert _chat(parallel_tool_calls=False, tool_choice="required").sampling.stop_after == (), "the grammar ends it"
    stops = [str(number) for number in range(MAX_STOPS)]
    assert len(_chat(parallel_tool_calls=False, stop=stops).sampling.stop) == MAX_STOPS


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tool_choice": "required", "tools": []}, "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "no tool rm"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "cannot have a JSON format"),
        ({"tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        ({"tools": [WEATHER, WEATHER]}, "two of them have the same name"),
    ],
    ids=str,
)
def test_invalid_tools_and_choices_are_refused(more: dict[str, Any], why: str) -> None:
    [error] = _errors("/chat/completions", [{"tools": [WEATHER], **more}])
    assert why in error["message"]


def test_template_kwargs_reach_the_template() -> None:
    asked = _asked("/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}})
    assert asked.prompt.template_kwargs == {"enable_thinking": False}
    [error] = _errors("/chat/completions", [{"chat_template_kwargs": {str(n): 1 for n in range(100)}}])
    assert error["param"] == "chat_template_kwargs"
    assert http_limits.MAX_TEMPLATE_KWARGS < 100


def test_effort_and_verbosity_reach_the_template_and_a_prediction_has_no_effect() -> None:
    path, hints = "/chat/completions", {"reasoning_effort": "high", "verbosity": "low"}
    predicted = {"prediction": {"type": "content", "content": "hello"}}
    assert _asked(path, {**hints, **predicted}).prompt.template_kwargs == hints
    given = {**hints, "chat_template_kwargs": {"reasoning_effort": 7}}
    assert _asked(path, given).prompt.template_kwargs == {"reasoning_effort": 7, "verbosity": "low"}
    wrong = [{"reasoning_effort": "huge"}, {"verbosity": 1}, {"prediction": {"type": "text", "content": "x"}}]
    params = [error["param"] for error in _errors(path, wrong)]
    assert params == ["reasoning_effort", "verbosity", "prediction.type"]


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        ("/completions", {"stop": 5}, "stop: it is 5"),
        ("/completions", {"prompt": {"a": 1}}, "prompt: it is a JSON object"),
        ("/completions", {"prompt": [{}]}, "prompt.0: it is a JSON object"),
        ("/chat/completions", {"stop": True}, "stop: it is true"),
        ("/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: it is 5"),
    ],
)
def test_field_that_takes_a_string_and_a_list_names_both(path: str, more: dict[str, Any], message: str) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.BadRequestError, match=f"{message}, and not a string or a list"):
            await openai.post(path, body={**PLAIN[path], **more}, cast_to=object)

    converse(ScriptedClient(), conversation)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [5, -1]}, "prompt.1"),
        ({"prompt": ["a", [5, -1]]}, "prompt.1.1"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
    ],
)
def test_error_names_the_place_in_the_request(more: dict[str, Any], param: str) -> None:
    [error] = _errors("/completions", [more])
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        ("/completions", {"prompt": []}, "prompt: it must not be empty"),
        ("/completions", {"prompt": [[]]}, "prompt.0: it must not be empty"),
        ("/chat/completions", {"messages": []}, "messages: it must not be empty"),
        ("/completions", {"stop": ["a"] * (MAX_STOPS + 1)}, f"stop: it must have at most {MAX_STOPS} items"),
        (
            "/completions",
            {"response_format": {"type": "xml"}},
            "response_format.type: it is 'xml', and not one of 'text', 'json_object', 'json_schema'",
        ),
        ("/completions", {"response_format": {}}, "response_format.type: it is missing"),
        ("/completions", {"response_format": "json"}, "response_format: it is 'json', and not a JSON object"),
        ("/completions", {"logprobs": "many"}, "logprobs: it is 'many', and not an integer"),
        ("/completions", {"user": 10**50}, "user: it is a number, and not a string"),
        ("/completions", {"temperature": 3}, "temperature: it must be at most 2"),
        ("/completions", {"temperature": 10**400}, "temperature: it is not a finite number"),
        ("/completions", {"top_p": 0}, "top_p: it must be greater than 0"),
        ("/completions", {"max_tokens": 0}, "max_tokens: it must be at least 1 without echo"),
        ("/completions", {"max_tokens": 0, "echo": False}, "max_tokens: it must be at least 1 without echo"),
        ("/completions", {"max_tokens": -1, "echo": True}, "max_tokens: it must be at least 0"),
        ("/completions", {"echo": 1}, "echo: it is 1, and not true or false"),
        ("/completions", {"echo": True, "logprobs": 6}, "logprobs: it must be at most 5"),
        ("/completions", {"echo": True, "logprobs": True}, "logprobs: it is true, and not an integer"),
        ("/completions", {"echo": True, "prompt": []}, "prompt: it must not be empty"),
        ("/completions", {"echo": True, "prompt": [1, -2]}, "prompt.1: it must be at least 0"),
        ("/completions", {"prompt": "half an emoji: \ud83d"}, "prompt: it is not valid Unicode"),
        ("/completions", {"model": ""}, "model: it must not be empty"),
        ("/chat/completions", {"logprobs": 5}, "logprobs: it is 5, and not true or false"),
        (
            "/chat/completions",
            {"tool_choice": "maybe"},
            "tool_choice: it is 'maybe', and not 'none', 'auto' or 'required' or a JSON object",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "assistant"}]},
            "messages.0.content: a message of role 'assistant' needs content or tool_calls",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]},
            "'messages.0.refusal' is not supported by this gateway: leave it out",
        ),
    ],
)
def test_errors_use_the_gateway_s_own_words(path: str, more: dict[str, Any], message: str) -> None:
    [error] = _errors(path, [more])
    assert error["message"] == message


def test_error_of_a_list_in_place_of_a_string_names_only_the_list() -> None:
    [messages, item] = _errors("/chat/completions", [{"messages": 5}, {"stop": [5]}])
    assert messages["message"] == "messages: it is 5, and not a list"
    assert item["message"] == "stop.0: it is 5, and not a string"


@pytest.mark.parametrize("path", PLAIN)
def test_best_of_below_n_is_refused_as_openai_does(path: str) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        for n in (2, 3):
            with pytest.raises(api.BadRequestError, match="best_of: must be at least n") as caught:
                await openai.post(path, body={**PLAIN[path], "n": n, "best_of": n - 1}, cast_to=object)
            assert caught.value.param == "best_of"

    converse(ScriptedClient(), conversation)
    assert _asked(path, {"n": 1, "best_of": 1}).sampling == Sampling(temperature=1.0, seed=1)


@pytest.mark.parametrize("path", PLAIN)
def test_options_of_a_stream_are_refused_without_one_as_openai_does(path: str) -> None:
    [error] = _errors(path, [{"stream_options": {}}])
    assert (error["message"], error["param"]) == ("stream_options: requires stream to be true", "stream_options")
    _asked(path, {"stream_options": {"include_obfuscation": True}, "stream": True})


def test_two_different_limits_on_new_tokens_are_refused() -> None:
    """OpenAI's API refuses equal ones as well."""

    async def conversation(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.BadRequestError, match="max_tokens: it differs from max_completion_tokens") as caught:
            await openai.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, max_completion_tokens=6
            )
        assert caught.value.param == "max_tokens"

    converse(ScriptedClient(), conversation)


def test_number_of_too_many_digits_is_named_as_such() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        body = {**PLAIN["/completions"], "seed": 0}
        text = json.dumps(body).replace('"seed": 0', f'"seed": {"1" * 5000}')
        url, headers = f"{openai.base_url}completions", {"Content-Type": "application/json"}
        response = await openai._client.post(url, content=text, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "the request body has a number of over 4300 digits"

    converse(ScriptedClient(), conversation)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ('"max_tokens": 1, "max_tokens": 500', "'max_tokens'"),
        ('"metadata": {"a": "1", "b": "2", "a": "3"}', "'a'"),
        (r'"logit_bias": {"5": 1, "\u0035": 1}', "'5'"),
        (r'"metadata": {"\ud800": "1", "\ud800": "1"}', r"'\ud800'"),
        (f'"tools": [{{"{"x" * 500}": 1, "{"x" * 500}": 1}}]', "a string"),
    ],
)
def test_object_with_a_key_twice_is_refused_with_the_key_s_name(more: str, key: str) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        content = f'{{"model": "tiny", "prompt": "hi", {more}}}'
        headers = {"content-type": "application/json"}
        response = await openai._client.post(f"{openai.base_url}completions", content=content, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "invalid_json", None)
        assert key in error["message"]
        assert error["message"].startswith("the request body is not valid JSON: an object has the key ")

    converse(ScriptedClient(), conversation)


def test_number_as_text_is_no_number() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.BadRequestError, match="max_tokens"):
            await openai.post("/completions", body={**PLAIN["/completions"], "max_tokens": "5"}, cast_to=object)

    converse(ScriptedClient(script=[ScriptedToken("a", "stop")]), conversation)


MANY = 20_000
CHAT = {"model": "tiny", "messages": HELLO}
COMPLETION = {"model": "tiny", "prompt": "hi"}
RESPONSE = {"model": "tiny", "input": "hi"}
UNREADABLE = {f"\ud800{number}": 1 for number in range(MANY)}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {**COMPLETION, **{f"field {number}": 1 for number in range(MANY)}}),
        (CompletionRequest, {**COMPLETION, "prompt": [{}] * MANY}),
        (CompletionRequest, {**COMPLETION, "prompt": [[-1] * MANY] * 16}),
        (CompletionRequest, {**COMPLETION, "stop": [1] * MANY}),
        (CompletionRequest, {**COMPLETION, "stop_token_ids": [-1] * MANY}),
        (CompletionRequest, {**COMPLETION, "logit_bias": {f"token {number}": 1 for number in range(MANY)}}),
        (ChatRequest, {**CHAT, "messages": [{}] * MANY}),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [{}] * 64}] * 1024}),
        (ChatRequest, {**CHAT, "messages": [{"role": "assistant", "tool_calls": [{}] * 128}] * 1024}),
        (ChatRequest, {**CHAT, "tools": [{}] * MANY}),
        (ChatRequest, {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": UNREADABLE}}]}),
        (ResponsesRequest, {**RESPONSE, "input": [{}] * MANY}),
        (ResponsesRequest, {**RESPONSE, "input": [{"role": "user", "content": [{}] * 64}] * 1024}),
        (ResponsesRequest, {**RESPONSE, "tools": [{}] * MANY}),
        (ResponsesRequest, {**RESPONSE, "include": [1] * MANY}),
        (ResponsesRequest, {**RESPONSE, "metadata": {f"note {number}": 1 for number in range(MANY)}}),
        (EmbeddingRequest, {"model": "tiny", "input": [[-1] * MANY] * 64}),
        (TokenizeChat, {**CHAT, "messages": [{}] * MANY}),
        (TokenizeChat, {**CHAT, "tools": [{}] * MANY}),
        (DetokenizeRequest, {"model": "tiny", "tokens": [-1] * MANY}),
    ],
)
def test_only_a_few_errors_are_reported_for_a_body_with_many(kind: type[StrictBody], body: dict[str, Any]) -> None:
    """Otherwise one body of some megabytes would take a gateway's loop for half a minute, and gigabytes of memory."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 4


def test_too_many_biases_are_refused_by_their_number() -> None:
    biases = {str(token_id): 1 for token_id in range(limits.MAX_BIASES + 1)}
    [error] = _errors("/completions", [{"logit_bias": biases}])
    assert (error["param"], error["message"]) == (
        "logit_bias",
        f"logit_bias: must have at most {limits.MAX_BIASES} items",
    )
    biases.popitem()
    assert len(_asked("/completions", {"logit_bias": biases}).sampling.logit_bias) == limits.MAX_BIASES


@pytest.mark.parametrize("kind", [ChatRequest, TokenizeChat])
def test_tool_arguments_with_too_many_values_are_refused(
    kind: type[StrictBody], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates get them parsed: 4 MB of empty lists would take the loop for a second, and a hundred megabytes."""
    monkeypatch.setattr(http_limits, "MAX_HTTP_VALUES", 100)

    def check(arguments: str) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        kind.model_validate({**CHAT, "messages": [{"role": "assistant", "tool_calls": [call, call]}]})

    check(json.dumps({"code": '[{"a\\"}]' * 100}))
    check(json.dumps({"numbers": [*range(1000)]}))
    with pytest.raises(ValidationError, match="the arguments of the calls have over 100 objects, lists and strings"):
        check(json.dumps({"lists": [[]] * 60}))
