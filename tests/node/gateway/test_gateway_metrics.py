"""The metrics that a gateway records of its requests."""

from __future__ import annotations

import asyncio

import openai as api
import pytest
from hypothesis import given
from hypothesis import strategies as st
from node.gateway.scripted_client import Hang, ScriptedClient, ScriptedModel, ScriptedToken, converse
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families
from swarm_node.gateway.metrics import MAX_WAITS, WINDOW_S, FirstTokenWaits, Metrics, RequestTimes
from swarm_node.metrics.metric_contract import METRICS
from swarm_node.metrics.metric_registry import Registry


async def _read(openai: AsyncOpenAI) -> dict[str, float]:
    """Return samples by name and the values of their labels, in the order of the labels' names."""
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


def test_echoed_prompt_is_neither_counted_nor_timed_as_an_answer() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        await openai.completions.create(model="tiny", prompt="hi", max_tokens=0, echo=True)
        found = await _read(openai)
        assert (found["generation_tokens_total"], found["time_to_first_token_seconds_count"]) == (0, 0)
        assert found["request_success_total,length"] == 1

    converse(ScriptedClient(script=[ScriptedToken("hi", "length", is_prompt=True)]), conversation)


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
    async with asyncio.timeout(60):
        while True:
            found = await _read(openai)
            if (found["num_requests_waiting"], found["num_requests_running"]) == (waiting, running):
                return
            await asyncio.sleep(0.005)


def test_refusals_are_counted_by_reason_and_no_label_has_text_of_a_client() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        for model, prompt in (("nobody", "hi"), ("gap", "hi"), ("tiny", 5)):
            with pytest.raises(api.APIStatusError):
                await openai.post("/completions", body={"model": model, "prompt": prompt}, cast_to=object)
        for path in ("/a", "/b"):
            with pytest.raises(api.NotFoundError):
                await openai.get(path, cast_to=object)
        await openai._client.request("BREW", f"{openai.base_url}completions")
        await openai._client.head(f"{openai.base_url}models")
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
        assert found["http_requests_total,HEAD,/v1/models,200"] == 1
        assert found["http_requests_total,other,/v1/completions,405"] == 1

    converse(ScriptedClient(served=[ScriptedModel(), ScriptedModel(name="gap", missing=[(0, 1)])]), conversation)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_first_tokens_without_requests_are_not_known() -> None:
    assert FirstTokenWaits().newest() == (None, None)


def test_first_tokens_are_the_median_and_the_95th_percentile() -> None:
    waits = FirstTokenWaits(Clock())
    for hundredth in range(100, 0, -1):
        waits.add(hundredth / 100)
    assert waits.newest() == (0.5, 0.95)


def test_first_token_times_of_one_request_are_its_own() -> None:
    waits = FirstTokenWaits(Clock())
    waits.add(0.7)
    assert waits.newest() == (0.7, 0.7)


def test_first_tokens_drop_requests_older_than_their_window() -> None:
    clock = Clock()
    waits = FirstTokenWaits(clock)
    waits.add(9.0)
    clock.now += WINDOW_S - 1
    waits.add(1.0)
    assert waits.newest() == (1.0, 9.0)
    clock.now += 2
    assert waits.newest() == (1.0, 1.0)
    clock.now += WINDOW_S
    assert waits.newest() == (None, None)


def test_first_tokens_are_of_the_newest_when_there_are_very_many_requests() -> None:
    waits = FirstTokenWaits(Clock())
    for _ in range(MAX_WAITS):
        waits.add(9.0)
    for _ in range(MAX_WAITS):
        waits.add(1.0)
    assert waits.newest() == (1.0, 1.0)


@given(st.lists(st.floats(0, 3600), min_size=1, max_size=50))
def test_first_tokens_lie_among_the_times_of_any_requests(seconds: list[float]) -> None:
    waits = FirstTokenWaits(Clock())
    for each in seconds:
        waits.add(each)
    p50_s, p95_s = waits.newest()
    assert p50_s is not None
    assert {p50_s, p95_s} <= set(seconds)
    assert sum(each <= p50_s for each in seconds) * 2 >= len(seconds)
    assert sum(each <= p95_s for each in seconds) * 100 >= 95 * len(seconds)
    assert p50_s <= p95_s


def test_metrics_of_a_request_time_its_first_token_once() -> None:
    metrics = Metrics(Registry())
    with RequestTimes(metrics) as times:
        assert metrics.first_tokens.newest() == (None, None)
        times.token(0)
        first = metrics.first_tokens.newest()
        times.token(0)
        times.token(1)
    assert first != (None, None)
    assert metrics.first_tokens.newest() == first
    with RequestTimes(metrics):
        pass  # refused, without a token
    assert metrics.first_tokens.newest() == first


def test_request_refused_by_its_body_s_form_is_counted_under_no_route_as_the_contract_says() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        await openai._client.post(f"{openai.base_url}completions", content="x", headers={"content-type": "text/plain"})
        assert (await _read(openai))["http_requests_total,POST,other,415"] == 1
        assert "body's form" in METRICS["swarm_gateway_http_requests_total"].labels["route"]

    converse(ScriptedClient(), conversation)
