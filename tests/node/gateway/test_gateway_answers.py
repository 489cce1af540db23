"""Answers as OpenAI's own client sees them, whole and streamed."""

from __future__ import annotations

import pytest
from node.gateway.scripted_client import Hang, ScriptedClient, ScriptedModel, ScriptedToken, converse
from openai import AsyncOpenAI
from swarm.client.request import GenerationRequest, Prompt
from swarm.serving.sampling.sampling import Sampling

HELLO = [{"role": "user", "content": "hi"}]
CACHED = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}


def test_completion_whole_has_text_reason_and_usage() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai.completions.create(model="tiny", prompt="hi")
        assert answer.object == "text_completion"
        assert answer.choices[0].text == "hello!"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)

    converse(ScriptedClient(), conversation)


def test_completion_streamed_gives_each_token_then_the_reason() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        stream = await openai.completions.create(model="tiny", prompt="hi", stream=True)
        chunks = [chunk async for chunk in stream]
        assert [chunk.choices[0].text for chunk in chunks] == ["hel", "lo", "!", ""]
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
        assert len({chunk.id for chunk in chunks}) == 1

    converse(ScriptedClient(), conversation)


def test_chat_whole_is_an_assistant_message() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai.chat.completions.create(model="tiny", messages=HELLO)
        assert answer.object == "chat.completion"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content == "hello!"

    converse(ScriptedClient(), conversation)


def test_chat_streamed_sends_the_role_first_and_the_reason_last() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        stream = await openai.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        *spoken, usage = chunks
        assert spoken[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].delta.content for chunk in spoken] == ["", "hel", "lo", "!", None]
        assert [chunk.choices[0].finish_reason for chunk in spoken] == [None, None, None, None, "stop"]
        assert usage.choices == []
        assert usage.usage is not None
        assert usage.usage.completion_tokens == 3

    converse(ScriptedClient(), conversation)


def test_stream_ends_with_done() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        async with openai.completions.with_streaming_response.create(
            model="tiny", prompt="hi", stream=True
        ) as response:
            text = await response.text()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no", "nginx would keep the answer until its end"
        assert text.endswith("\n\ndata: [DONE]\n\n")

    converse(ScriptedClient(), conversation)


def test_sampling_fields_reach_the_client() -> None:
    client = ScriptedClient()

    async def conversation(openai: AsyncOpenAI) -> None:
        await openai.completions.create(
            model="tiny", prompt="hi", max_tokens=9, temperature=0, top_p=0.5, seed=7, stop="x", extra_body={"top_k": 4}
        )

    converse(client, conversation)
    assert client.asked == [
        GenerationRequest(
            model="tiny",
            prompt=Prompt(prompt="hi"),
            max_tokens=9,
            sampling=Sampling(temperature=0.0, top_p=0.5, top_k=4, seed=7, stop=("x",)),
            num_logprobs=None,
            stream=True,
            left_out=["min_p", "repetition_penalty"],
        )
    ]


def test_chat_fields_are_passed_on_flattened() -> None:
    client = ScriptedClient()

    async def conversation(openai: AsyncOpenAI) -> None:
        await openai.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [CACHED, {"type": "text", "text": "b"}]},
            ],
            max_tokens=6,
            max_completion_tokens=6,
            user="someone",
            temperature=None,
        )

    converse(client, conversation)
    (asked,) = client.asked
    assert asked.prompt.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}]
    assert asked.max_tokens == 6
    assert asked.sampling.temperature == 1.0


def test_models_are_listed_and_shown() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        assert [model.id async for model in openai.models.list()] == ["tiny", "org/other"]
        assert (await openai.models.retrieve("org/other")).owned_by == "swarm"

    converse(ScriptedClient(served=[ScriptedModel(), ScriptedModel(name="org/other")]), conversation)


def test_request_looks_up_only_its_own_model() -> None:
    client = ScriptedClient()

    async def conversation(openai: AsyncOpenAI) -> None:
        await openai.completions.create(model="tiny", prompt="hi")
        await openai.models.retrieve("tiny")
        assert client.num_listed == 0

    converse(client, conversation)


@pytest.mark.parametrize(
    ("served", "status"),
    [
        ([ScriptedModel()], 200),
        ([ScriptedModel(), ScriptedModel(name="bogus", missing=[(1, 3)])], 200),
        ([ScriptedModel(missing=[(1, 3)])], 503),
        ([], 503),
    ],
)
def test_health_is_ok_while_one_model_is_whole_and_names_missing_blocks(
    served: list[ScriptedModel], status: int
) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        response = await openai._client.get(str(openai.base_url).replace("/v1/", "/health"))
        assert response.status_code == status
        assert [model["missing_blocks"] for model in response.json()["models"]] == [
            [list(gap) for gap in model.missing] for model in served
        ]
        assert all(model["age_s"] == 12.3 for model in response.json()["models"])
        if any(model.missing for model in served):
            assert "nobody serves blocks 1:3 of 4" in response.json()["detail"]

    converse(ScriptedClient(served=served), conversation)


def test_trace_is_found_by_the_header_and_by_the_answers_id() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        response = await openai.completions.with_raw_response.create(model="tiny", prompt="hi")
        trace_id = response.headers["x-swarm-trace"]
        assert response.parse().id == trace_id
        assert response.request_id == trace_id, "OpenAI's client shows it"
        assert await openai.get(f"/traces/{trace_id}", cast_to=object) == {
            "id": trace_id,
            "tokens": 3,
            "sampling": {"temperature": 1, "top_p": 0.8, "top_k": 0, "min_p": 0, "repetition_penalty": 1},
            "num_reused_tokens": 2,
            "replays": [],
        }

    converse(ScriptedClient(own={"top_p": 0.8}), conversation)


def test_trace_of_a_running_answer_is_current() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        stream = await openai.completions.create(model="tiny", prompt="hi", stream=True)
        first = await anext(aiter(stream))
        trace = await openai.get(f"/traces/{first.id}", cast_to=dict)
        assert trace["tokens"] == 1
        await stream.close()

    converse(ScriptedClient(script=[ScriptedToken("a"), Hang()]), conversation)
