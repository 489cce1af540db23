"""Every object in a response is one of OpenAI's own types, strictly, without any other field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from node.gateway.scripted_client import ScriptedClient, ScriptedLikely, ScriptedToken, converse
from openai import AsyncOpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from swarm_node.gateway.choice import CLOSING, OPENING

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = OPENING + '{"name": "f", "arguments": {}}' + CLOSING
SCRIPT = [
    ScriptedToken("a", data=b"a", logprob=-1.0, top=[ScriptedLikely(b"a", -1.0)]),
    ScriptedToken(CALL, data=CALL.encode(), logprob=-1.0),
    ScriptedToken("", "stop"),
]
PLAIN: dict[str, Any] = {"model": "tiny", "n": 2, "seed": 1}
STREAM = {**PLAIN, "stream": True, "stream_options": {"include_usage": True}}
CHATS = [{}, {"logprobs": True, "top_logprobs": 1}, {"tools": [TOOL]}, {"tools": [TOOL], "logprobs": True}]


def _check(kind: type[BaseModel], written: str) -> BaseModel:
    """Parse `written` as `kind`, and compare it with what it serializes to."""
    found = kind.model_validate_json(written, strict=True)
    _no_extra(found)
    assert found.model_dump(exclude_unset=True, mode="json") == json.loads(written)
    return found


def _no_extra(value: Any) -> None:
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{type(value).__name__} has no {list(value.model_extra)}"
        for name in value.model_fields_set:
            _no_extra(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            _no_extra(item)


def _sent(path: str, body: dict[str, Any]) -> list[str]:
    """Return the objects of a response; the end of a stream, which must be there, is left out."""
    texts: list[str] = []

    async def conversation(openai: AsyncOpenAI) -> None:
        response = await openai._client.post(f"{openai.base_url}{path}", json=body)
        assert response.status_code == 200, response.text
        texts.append(response.text)

    converse(ScriptedClient(script=SCRIPT), conversation)
    if not body.get("stream"):
        return texts
    *events, done, end = texts[0].split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [event.removeprefix("data: ") for event in events]


@pytest.mark.parametrize("more", CHATS)
def test_chat_is_openais_type(more: dict[str, Any]) -> None:
    [written] = _sent("chat/completions", {**PLAIN, "messages": HELLO, **more})
    _check(ChatCompletion, written)


@pytest.mark.parametrize("more", CHATS)
def test_chat_chunks_are_openais_type_and_only_the_last_has_usage(more: dict[str, Any]) -> None:
    events = _sent("chat/completions", {**STREAM, "messages": HELLO, **more})
    chunks = [_check(ChatCompletionChunk, event) for event in events]
    assert [json.loads(event)["usage"] is None for event in events] == [True] * (len(chunks) - 1) + [False]
    assert json.loads(events[-1])["choices"] == []


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
def test_completion_and_its_chunks_are_openais_type(more: dict[str, Any]) -> None:
    [written] = _sent("completions", {**PLAIN, "prompt": "hi", **more})
    _check(Completion, written)
    for event in _sent("completions", {**STREAM, "prompt": "hi", **more}):
        # OpenAI streams these with a null reason, which its own type does not allow
        _no_extra(Completion.model_construct(**json.loads(event)))
        assert set(json.loads(event)) == {"id", "object", "created", "model", "choices", "usage"}


def test_stream_without_usage_does_not_mention_it() -> None:
    events = _sent("chat/completions", {"model": "tiny", "messages": HELLO, "stream": True})
    assert all("usage" not in json.loads(event) for event in events)


def test_model_is_openais_type_and_its_time_is_when_it_was_first_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1_700_000_000.5]
    monkeypatch.setattr("swarm_node.gateway.served_models.time.time", lambda: now_s[0])

    async def conversation(openai: AsyncOpenAI) -> None:
        for _ in range(2):
            response = await openai._client.get(f"{openai.base_url}models/tiny")
            found = Model.model_validate_json(response.text)
            assert found.created == 1_700_000_000
            ours = {"revision", "other_revisions", "publisher", "manifest", "standing"}
            assert set(found.model_extra or ()) == ours, "a field that OpenAI's objects lack"
            now_s[0] += 100

    converse(ScriptedClient(), conversation)


def test_openapi_describes_every_route_with_openais_types() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        response = await openai._client.get(str(openai.base_url).replace("/v1/", "/openapi.json"))
        described = response.json()
        assert set(described["paths"]) == {
            "/v1/models",
            "/v1/models/{model}",
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/embeddings",
            "/tokenize",
            "/detokenize",
            "/v1/traces/{trace_id}",
            "/health",
            "/metrics",
        }
        for path, methods in described["paths"].items():
            for method in methods.values():
                assert "422" not in method["responses"], f"{path} refuses with 400"
        answers = described["paths"]["/v1/chat/completions"]["post"]["responses"]
        schema = answers["200"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ChatCompletion"}
        assert {"400", "401", "404", "413", "429", "503"} <= set(answers)

    converse(ScriptedClient(), conversation)
