"""Any request gets an answer or a refusal in OpenAI's form, and never an internal error of the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from node.gateway.scripted_client import ScriptedClient, converse
from openai import AsyncOpenAI
from swarm_node.gateway.app import create_app

FIELDS = [
    *(
        "model",
        "prompt",
        "messages",
        "n",
        "best_of",
        "logprobs",
        "top_logprobs",
        "max_tokens",
        "seed",
        "stop",
        "stream",
    ),
    *("max_completion_tokens", "temperature", "top_p", "top_k", "stream_options", "tools", "tool_choice", "echo"),
    *("suffix", "logit_bias", "presence_penalty", "response_format", "parallel_tool_calls", "functions", "user"),
    *("input", "instructions", "text", "include", "reasoning", "max_output_tokens", "metadata", "store"),
]
NESTED = [
    "role",
    "content",
    "type",
    "text",
    "tool_calls",
    "tool_call_id",
    "function",
    "name",
    "arguments",
    "id",
    "call_id",
    "output",
    "format",
    "\ud800",
]
WORDS = ["tiny", "user", "assistant", "tool", "system", "text", "function", "none", "auto", "{}", "\ud800", "\0", ""]
WORDS += ["message", "function_call", "function_call_output", "reasoning", "input_text", "json_object"]

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(WORDS))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NESTED), inner, max_size=5),
    max_leaves=12,
)
items = st.lists(st.dictionaries(st.sampled_from(NESTED), scalars | st.just([{"type": "input_text", "text": "x"}])))
texts: dict[str, dict[str, Any]] = {
    "completions": {"prompt": st.just("hi") | st.just([1, 2])},
    "chat/completions": {"messages": st.just([{"role": "user", "content": "hi"}])},
    "responses": {"input": st.just("hi") | items},
}
bodies = {
    path: st.fixed_dictionaries(
        {"model": st.just("tiny"), **text},
        optional={field: values for field in FIELDS if field not in {"model", "prompt", "messages", "input"}},
    )
    for path, text in texts.items()
}
wild = st.dictionaries(st.sampled_from(FIELDS), values, max_size=8) | values


Post = Callable[[str, bytes, str], httpx.Response]


@pytest.fixture(scope="module")
def post() -> Iterator[Post]:
    """`post("completions", content, "application/json")` returns a response of one gateway, which serves all these
    tests.
    """
    transport = httpx.ASGITransport(create_app(ScriptedClient()), raise_app_exceptions=True)
    client = httpx.AsyncClient(transport=transport, base_url="http://gateway/v1")
    with asyncio.Runner() as runner:
        yield lambda path, content, kind: runner.run(client.post(path, content=content, headers={"content-type": kind}))
        runner.run(client.aclose())


def _check(response: httpx.Response) -> None:
    assert response.status_code in {200, 400, 404, 415}, response.text
    if response.status_code == 200:
        return
    error = json.loads(response.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"]
    assert "Traceback" not in error["message"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(bodies)).flatmap(lambda path: st.tuples(st.just(path), bodies[path] | wild)))
def test_any_json_is_answered_or_refused(post: Post, sent: tuple[str, Any]) -> None:
    path, body = sent
    _check(post(path, json.dumps(body).encode(), "application/json"))


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(["application/json", "text/plain", "application/json; charset=utf-16"]))
def test_any_bytes_are_refused(post: Post, content: bytes, kind: str) -> None:
    _check(post("completions", content, kind))


@pytest.mark.parametrize(
    "content",
    [
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b"[" * 100_000,
        b'{"model": "tiny", "prompt": "hi", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "tiny", "prompt": "hi", "max_tokens": ' + b"9" * 100_000 + b"}",
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "\\ud800", "prompt": "hi"}',
        b'{"model": "tiny", "prompt": "hi", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "hi", "top_p": 1e999}',
        b'{"model": "tiny", "prompt": "hi", "seed": -9223372036854775808}',
        b"",
        b"null",
    ],
)
def test_hostile_body_is_a_bad_request(content: bytes) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        response = await openai._client.post(
            f"{openai.base_url}completions", content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert (await openai.completions.create(model="tiny", prompt="hi")).choices[0].text == "hello!"

    converse(ScriptedClient(), conversation)


def test_refusals_of_http_itself_have_openai_s_form() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        url = f"{openai.base_url}completions"
        put = await openai._client.put(url, json={})
        assert (put.status_code, put.json()["error"]["code"]) == (405, "method_not_allowed")
        form = await openai._client.post(url, data={"model": "tiny"})
        assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
        unsaid = await openai._client.post(url, content=b"{}", headers={})
        assert unsaid.status_code == 415

    converse(ScriptedClient(), conversation)
