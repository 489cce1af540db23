"""What a gateway counts, as Prometheus reads it."""

from __future__ import annotations

import asyncio

import openai as api
import pytest
from node.gateway.scripted_client import Hang, ScriptedClient, ScriptedModel, ScriptedToken, converse
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families


async def _read(openai: AsyncOpenAI) -> dict[str, float]:
    """Samples by name and the values of their labels, in these names' order."""
    response = await openai._client.get(str(openai.base_url).replace("/v1/", "/metrics"))
    assert response.headers["content-type"].startswith("text/plain")
    return {
        sample.name.removeprefix("swarm_gateway_")
        + "".join(f",{value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_answer_is_counted_and_timed() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        await openai.completions.create(model="tiny", prompt="hi", n=2)
        found = await _read(openai)
        assert found["http_requests_total,POST,/v1/completions,200"] == 1
        assert found["request_success_total,stop"] == 2
        assert (found["prompt_tokens_total"], found["prompt_tokens_cached_total"]) == (3, 2)
        assert found["generation_tokens_total"] == 6
        assert found["time_to_first_token_seconds_count"] == 1
        assert found["inter_token_latency_seconds_count"] == 4
        assert found["e2e_request_latency_seconds_count"] == 1
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (0, 0)

    converse(ScriptedClient(), conversation)


def test_request_waits_until_its_first_token_and_then_runs() -> None:
    first = asyncio.Event()
    client = ScriptedClient(script=[first, ScriptedToken("a"), Hang()])

    async def conversation(openai: AsyncOpenAI) -> None:
        asking = asyncio.create_task(openai.completions.create(model="tiny", prompt="hi"))
        await _until(openai, waiting=1, running=0)
        first.set()
        await _until(openai, waiting=0, running=1)
        asking.cancel()
        await _until(openai, waiting=0, running=0)
        assert (await _read(openai))["http_requests_total,POST,/v1/completions,gone"] == 1

    converse(client, conversation)


async def _until(openai: AsyncOpenAI, *, waiting: int, running: int) -> None:
    async with asyncio.timeout(10):
        while True:
            found = await _read(openai)
            if (found["num_requests_waiting"], found["num_requests_running"]) == (waiting, running):
                return
            await asyncio.sleep(0.005)


def test_refusals_are_counted_by_reason_and_what_a_client_sends_makes_no_label() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        for model, prompt in (("nobody", "hi"), ("gap", "hi"), ("tiny", 5)):
            with pytest.raises(api.APIStatusError):
                await openai.post("/completions", body={"model": model, "prompt": prompt}, cast_to=object)
        for path in ("/a", "/b"):
            with pytest.raises(api.NotFoundError):
                await openai.get(path, cast_to=object)
        await openai._client.request("BREW", f"{openai.base_url}completions")
        await openai._client.post(f"{openai.base_url}completions", content=b"x")
        found = await _read(openai)
        refusals = {name: value for name, value in found.items() if name.startswith("refusals_total")}
        assert refusals == {
            "refusals_total,model_not_found": 1,
            "refusals_total,model_not_served": 1,
            "refusals_total,invalid_value": 1,
            "refusals_total,not_found": 2,
            "refusals_total,method_not_allowed": 1,
            "refusals_total,unsupported_media_type": 1,
        }
        assert found["http_requests_total,GET,other,404"] == 2

    converse(ScriptedClient(served=[ScriptedModel(), ScriptedModel(name="gap", missing=[(0, 1)])]), conversation)
