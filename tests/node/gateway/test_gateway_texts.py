"""Embeddings, tokens and their texts over HTTP; `test_gateway_swarm.py` tests them over real servers."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import openai as api
import pytest
from node.gateway.scripted_client import ScriptedClient, converse
from openai import AsyncOpenAI
from swarm.client.request import Prompt
from swarm_node.gateway.app import GatewayOptions
from swarm_node.http.rate_limit import Rates


def test_embeddings_of_several_inputs_come_in_their_order_and_in_both_encodings() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        inputs: list[Any] = [["a", "abc"], [[1, 2, 3, 4]], "ab", [5, 6]]
        lengths = [[1, 3], [4], [2], [2]]
        for given, expected in zip(inputs, lengths, strict=True):
            for encoding in ("float", "base64"):
                body = {"model": "tiny", "input": given, "encoding_format": encoding}
                answer: Any = await openai.post("/embeddings", body=body, cast_to=object)
                assert [one["index"] for one in answer["data"]] == list(range(len(expected)))
                vectors = [one["embedding"] for one in answer["data"]]
                if encoding == "base64":
                    vectors = [list(struct.unpack("<2f", base64.b64decode(vector))) for vector in vectors]
                assert vectors == [[length, 0.5] for length in expected]
                assert answer["usage"] == {"prompt_tokens": sum(expected), "total_tokens": sum(expected)}
        typed = await openai.embeddings.create(model="tiny", input="abc")
        assert typed.data[0].embedding == [3.0, 0.5]

    converse(ScriptedClient(), conversation)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"dimensions": 8}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"foo": 1}, "foo"),
        ({"input": None}, "input"),
    ],
    ids=str,
)
def test_embeddings_refuse_unsupported_fields_by_name(more: dict[str, Any], param: str) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.BadRequestError) as error:
            await openai.post("/embeddings", body={"model": "tiny", "input": "a", **more}, cast_to=object)
        assert error.value.param == param

    converse(ScriptedClient(), conversation)


def test_as_many_inputs_as_openai_allows_are_embedded_and_count_as_several_answers() -> None:
    """Clients send up to so many at once by default: Vercel's AI SDK 2,048, LangChain 1,000 or 512, LlamaIndex 100."""

    async def conversation(openai: AsyncOpenAI) -> None:
        inputs = ["a" * (1 + number % 3) for number in range(2048)]
        answer = await openai.embeddings.create(model="tiny", input=inputs, encoding_format="float")
        assert [one.embedding[0] for one in answer.data] == [*map(len, inputs)]

    async def crowded(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.RateLimitError, match="at most 7 answers of a model at once"):
            await openai.embeddings.create(model="tiny", input=["a"] * 1793)

    converse(ScriptedClient(), conversation, GatewayOptions(max_requests=8))
    converse(ScriptedClient(), crowded, GatewayOptions(max_requests=7))


def test_embeddings_count_as_tokens_and_take_a_slot() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        await openai.embeddings.create(model="tiny", input="a" * 60)
        with pytest.raises(api.RateLimitError):
            await openai.embeddings.create(model="tiny", input="a" * 60)
        with pytest.raises(api.NotFoundError):
            await openai.embeddings.create(model="huge", input="a")

    converse(ScriptedClient(), conversation, GatewayOptions(rates=Rates(tokens_per_min=100)))


def test_tokenize_and_detokenize_have_vllm_s_form() -> None:
    client = ScriptedClient()

    async def conversation(openai: AsyncOpenAI) -> None:
        async def ask(path: str, **body: Any) -> dict[str, Any]:
            response = await openai._client.post(str(openai.base_url).replace("/v1/", path), json=body)
            answer: dict[str, Any] = response.json()
            return answer

        text = await ask("/tokenize", model="tiny", prompt="hi")
        assert text == {"count": 2, "max_model_len": 256, "tokens": [104, 105], "token_strs": None}
        messages = [{"role": "user", "content": "hi"}]
        kwargs = {"enable_thinking": False}
        chat = await ask("/tokenize", model="tiny", messages=messages, chat_template_kwargs=kwargs)
        assert chat["tokens"] == [104, 105]
        await ask("/tokenize", model="tiny", messages=messages, add_generation_prompt=False)
        assert await ask("/detokenize", model="tiny", tokens=[104, 105]) == {"prompt": "hi"}
        for path, body in (
            ("/tokenize", {"model": "huge", "prompt": "x"}),
            ("/detokenize", {"model": "huge", "tokens": []}),
        ):
            assert (await ask(path, **body))["error"]["code"] == "model_not_found"
        refused = await ask("/tokenize", model="tiny", prompt="hi", return_token_strs=True)
        assert refused["error"]["code"] == "unsupported_parameter"
        assert (await ask("/tokenize", model="tiny", prompt="hi", foo=1))["error"]["code"] == "unknown_parameter"
        assert (await ask("/detokenize", model="tiny", tokens=[-1]))["error"]["param"] == "tokens.0"

    converse(client, conversation)
    asked = [dict(question.template_kwargs) for question in client.tokenized]
    assert asked == [{}, {"enable_thinking": False}, {"add_generation_prompt": False}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_request_takes_a_slot_and_frees_it_when_its_client_leaves(path: str, body: dict[str, Any]) -> None:
    """The request to the swarm is cancelled, too."""
    client = Stuck()

    async def conversation(openai: AsyncOpenAI) -> None:
        url = str(openai.base_url).replace("/v1/", path)
        asking = asyncio.create_task(openai._client.post(url, json={"model": "tiny", **body}))
        await client.reached.wait()
        refused = await openai._client.post(url, json={"model": "tiny", **body})
        assert refused.status_code == 429
        asking.cancel()
        await client.cancelled.wait()
        client.is_stuck = False
        health = str(openai.base_url).replace("/v1/", "/health")
        while (await openai._client.get(health)).json()["running_requests"]:
            await asyncio.sleep(0.01)
        assert (await openai._client.post(url, json={"model": "tiny", **body})).status_code == 200

    converse(client, conversation, GatewayOptions(max_requests=1))


@dataclass
class Stuck(ScriptedClient):
    """A client whose servers and tokenizer do not answer."""

    is_stuck: bool = True
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def _wait(self) -> None:
        self.reached.set()
        try:
            if self.is_stuck:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def tokenize(self, text: Prompt, *, model: str) -> list[int]:
        await self._wait()
        return await super().tokenize(text, model=model)

    async def decode(self, token_ids: Sequence[int], *, model: str) -> str:
        await self._wait()
        return await super().decode(token_ids, model=model)
