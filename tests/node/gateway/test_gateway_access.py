"""Keys and rates: which callers are let in, how much each may request, and the refusals."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

import openai as api
import pytest
from node.gateway.scripted_client import Hang, ScriptedClient, ScriptedToken, converse
from openai import AsyncOpenAI
from swarm.ended_tasks import end_tasks
from swarm_node.gateway import http_limits
from swarm_node.gateway.admission import KeyRing
from swarm_node.gateway.answer_slots import AnswerSlots
from swarm_node.gateway.app import GatewayOptions
from swarm_node.http import rate_limit
from swarm_node.http.addresses import caller_of
from swarm_node.http.http_error import HttpError
from swarm_node.http.rate_limit import RateLimiter, RateLimiters, Rates
from swarm_protocol.errors import ConfigError

ANNE = "key-of-anne-0123456789"
BERT = "key-of-bert-0123456789"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _file(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "keys.txt"
    path.touch(mode=0o600)
    path.write_text(text)
    path.chmod(mode)
    return path


def _ring(tmp_path: Path, text: str) -> KeyRing:
    return KeyRing(_file(tmp_path, text), Clock())


def test_caller_that_holds_all_answers_keeps_no_other_caller_out(tmp_path: Path) -> None:
    client = ScriptedClient(scripts=[*[[Hang()]] * 16, [ScriptedToken("y", "stop")]])

    async def conversation(openai: AsyncOpenAI) -> None:
        anne, bert = openai.with_options(api_key=ANNE), openai.with_options(api_key=BERT)
        holding = asyncio.create_task(anne.completions.create(model="tiny", prompt="hi", n=16))
        await client.reached.wait()
        refused = "at most 16 answers of a model at once, .* 16 of this model and 0 of others run now"
        with pytest.raises(api.RateLimitError, match=refused):
            await anne.completions.create(model="tiny", prompt="hi")
        with pytest.raises(api.RateLimitError, match=refused):
            await bert.completions.create(model="tiny", prompt="hi", n=2)
        assert (await bert.completions.create(model="tiny", prompt="hi")).choices[0].text == "y"
        await end_tasks(holding)

    keys = _ring(tmp_path, f"anne {ANNE}\nbert {BERT}\n")
    converse(client, conversation, GatewayOptions(keys=keys, max_requests=16))


def test_model_whose_answers_all_wait_for_room_keeps_no_other_model_out() -> None:
    """Callers are one application with one key, or many people with an answer each."""
    slots = AnswerSlots(64)
    with ExitStack() as running:

        def num_admitted(model: str, caller: str = "") -> int:
            with suppress(HttpError):
                for number in count():
                    running.enter_context(slots.take(1, model, caller or f"{model} {number}"))
            return number

        assert (num_admitted("full", "app"), num_admitted("full")) == (64, 16)
        assert (num_admitted("idle", "app"), num_admitted("idle")) == (32, 8)
        assert num_admitted("full@0123456789") == 0, "a revision of a model is no other model"
        assert [num_admitted(f"idle {number}") for number in range(4)] == [20, 10, 5, 2]
        assert slots.num_running <= 2.5 * 64
    assert slots.num_running == 0
    with slots.take(64, "full", "app"):
        pass


def test_request_needs_a_valid_key(tmp_path: Path) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai.with_options(api_key=ANNE).completions.create(model="tiny", prompt="hi")
        assert answer.choices[0].text == "hello!"
        for wrong in ("none", ANNE[:-1], BERT):
            with pytest.raises(api.AuthenticationError) as error:
                await openai.with_options(api_key=wrong).models.list()
            assert error.value.code == "invalid_api_key"
            assert wrong not in error.value.message
            assert error.value.response.headers["www-authenticate"] == "Bearer"
        url = str(openai.base_url)
        assert (await openai._client.get(f"{url}models")).json()["error"]["code"] == "missing_api_key"
        described = (await openai._client.get(url.replace("/v1/", "/openapi.json"))).json()["paths"]
        statuses = {
            path: (await openai._client.request(method, url.replace("/v1/", path), json={})).status_code
            for path, methods in described.items()
            for method in methods
        }
        assert {path for path, status in statuses.items() if status != 401} == {"/health"}
        assert {"/metrics", "/tokenize", "/detokenize", "/v1/embeddings", "/v1/traces/{trace_id}"} <= statuses.keys()

    keys = _ring(tmp_path, f"# friends\nanne {ANNE}  # of old\n\n")
    converse(ScriptedClient(), conversation, GatewayOptions(keys=keys))


def test_each_key_has_its_own_rate_of_requests(tmp_path: Path) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        anne, bert = openai.with_options(api_key=ANNE), openai.with_options(api_key=BERT)
        first = await anne.completions.with_raw_response.create(model="tiny", prompt="hi")
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        await anne.models.list()
        with pytest.raises(api.RateLimitError, match="2 requests per minute") as error:
            await anne.models.list()
        assert error.value.code == "rate_limit_exceeded"
        assert 1 <= int(error.value.response.headers["retry-after"]) <= 30
        assert error.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        url, headers = str(openai.base_url).removesuffix("v1/"), {"authorization": f"Bearer {ANNE}"}
        statuses = {
            path: (await openai._client.get(f"{url}{path}", headers=headers)).status_code
            for path in ("health", "openapi.json", "metrics")
        }
        assert statuses == {"health": 200, "openapi.json": 200, "metrics": 429}
        for _ in range(5):
            await bert.models.list()

    keys = _ring(tmp_path, f"anne {ANNE} 2\nbert {BERT}")
    converse(ScriptedClient(), conversation, GatewayOptions(keys=keys))


def test_tokens_are_reserved_and_unused_ones_freed() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        # 3 of the prompt and 3 of the answer, of 100 that were reserved
        for _ in range(2):
            await openai.completions.create(model="tiny", prompt="hi", max_tokens=100)
        answer = await openai.completions.with_raw_response.create(model="tiny", prompt="hi", max_tokens=1)
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert left >= 102
        with pytest.raises(api.RateLimitError, match="120 tokens per minute"):
            await openai.completions.create(model="tiny", prompt="hi", max_tokens=1000)

    converse(ScriptedClient(), conversation, GatewayOptions(rates=Rates(tokens_per_min=120)))


def test_echo_without_an_answer_reserves_no_tokens() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        for _ in range(2):
            await openai.completions.create(model="tiny", prompt="hi", max_tokens=0, echo=True)

    script = [ScriptedToken("hi", "length", is_prompt=True)]
    converse(ScriptedClient(script=script), conversation, GatewayOptions(rates=Rates(tokens_per_min=120)))


def test_answer_without_a_limit_reserves_some_tokens_and_pays_for_others_as_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_limits, "RESERVED_TOKENS", 2)
    client = ScriptedClient(script=[*[ScriptedToken("a")] * 50, Hang()])

    async def conversation(openai: AsyncOpenAI) -> None:
        async def left() -> int:
            listed = await openai.models.with_raw_response.list()
            return int(listed.headers["x-ratelimit-remaining-tokens"])

        said = [{"role": "user", "content": "hi"}]
        asked = openai.post("/chat/completions", body={"model": "tiny", "messages": said}, cast_to=object)
        asking = asyncio.create_task(asked)
        await client.reached.wait()
        assert 70 <= await left() <= 72
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(60):
            while client.num_open:
                await asyncio.sleep(0.01)
        # with 3 of the prompt
        assert 67 <= await left() <= 70

    converse(client, conversation, GatewayOptions(rates=Rates(tokens_per_min=120)))


def test_failed_answer_frees_its_reserved_tokens() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        for _ in range(3):
            with pytest.raises(api.InternalServerError):
                await openai.completions.create(model="tiny", prompt="hi", max_tokens=100)

    script = [RuntimeError("broken")]
    converse(ScriptedClient(script=script), conversation, GatewayOptions(rates=Rates(tokens_per_min=120)))


def test_address_is_limited_where_there_are_no_keys() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        await openai.models.list()
        with pytest.raises(api.RateLimitError):
            await openai.models.list()
        health = await openai._client.get(str(openai.base_url).replace("/v1/", "/health"))
        assert health.status_code == 200

    converse(ScriptedClient(), conversation, GatewayOptions(rates=Rates(requests_per_min=1)))


def test_bucket_fills_with_time_up_to_a_minutes_worth() -> None:
    clock = Clock()
    limiter = RateLimiter(Rates(requests_per_min=60), clock)
    for _ in range(60):
        limiter.take_request()
    with pytest.raises(HttpError) as error:
        limiter.take_request()
    assert error.value.retry_after_s == pytest.approx(1.0)
    clock.now_s += 1.0
    limiter.take_request()
    clock.now_s += 3600
    assert limiter.headers()["x-ratelimit-remaining-requests"] == "60"
    assert limiter.headers()["x-ratelimit-reset-requests"] == "0ms"


def test_overdrawn_tokens_delay_the_next_request() -> None:
    clock = Clock()
    limiter = RateLimiter(Rates(tokens_per_min=60), clock)
    limiter.settle(limiter.reserve(10), 120)
    assert limiter.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert limiter.headers()["x-ratelimit-reset-tokens"] == "2m0s"
    clock.now_s += 0.5
    assert limiter.headers()["x-ratelimit-reset-tokens"] == "2m0s", "no minute has sixty seconds left over"
    with pytest.raises(HttpError):
        limiter.reserve(1)
    clock.now_s += 62
    limiter.reserve(1)


def test_callers_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "MAX_CALLERS", 2)
    limiters = RateLimiters(Clock())
    rates = Rates(requests_per_min=1)
    first = limiters.get("a", rates)
    limiters.get("b", rates)
    assert limiters.get("a", rates) is first
    limiters.get("c", rates)
    assert limiters.get("a", rates) is first
    assert limiters.get("a", Rates(requests_per_min=2)) is not first


def test_ipv6_addresses_of_a_network_are_one_caller() -> None:
    assert caller_of({"client": ("2001:db8::1", 1)}) == caller_of({"client": ("2001:db8::ffff", 2)})
    assert caller_of({"client": ("203.0.113.1", 1)}) != caller_of({"client": ("203.0.113.2", 1)})


def test_keys_are_read_again_when_they_change_and_kept_when_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    path = _file(tmp_path, f"anne {ANNE}")
    ring = KeyRing(path, clock)
    told: list[str] = []
    ring.on_unusable = lambda message, remedy: told.append(f"{message} → {remedy}")
    path.write_text(f"bert {BERT} 5 7\n")
    assert ring.find(BERT) is None, "the file is not read all the time"
    clock.now_s += http_limits.KEYS_FRESH_S
    found = ring.find(BERT)
    assert found is not None
    assert (found.name, found.rates) == ("bert", Rates(requests_per_min=5, tokens_per_min=7))
    assert ring.find(ANNE) is None
    path.write_text("nonsense")
    clock.now_s += http_limits.KEYS_FRESH_S
    assert ring.find(BERT) == found
    assert "the API keys stay as they were" in caplog.text
    for _ in range(3):
        path.unlink(missing_ok=True)
        clock.now_s += http_limits.KEYS_FRESH_S
        assert ring.find(BERT) == found
    unlike, gone = told
    assert unlike.startswith(f"the API keys stay as they were: line 1 of {path} is not an API key → write: name key")
    assert gone == (
        f"the API keys stay as they were: the file of API keys {path} cannot be read: no such file or directory "
        "→ check --api-keys"
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "has 0 API keys"),
        ("anne short", "line 1 of .* is not an API key"),
        (f"\n\nanne {ANNE} many", "line 3 of"),
        (f"anne {ANNE} 1 2 3", "line 1 of"),
        (f"{ANNE}", "line 1 of"),
        (f"anne {ANNE}\nanne {BERT}", "the same name twice"),
        (f"anne {ANNE}\nbert {ANNE}", "the same key twice"),
    ],
)
def test_bad_file_of_keys_is_reported_without_the_key(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        _ring(tmp_path, text)
    assert ANNE not in str(error.value)


def test_file_of_keys_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyRing(_file(tmp_path, f"anne {ANNE}", mode=0o640), Clock())
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing(tmp_path / "nothing", Clock())
    os.mkfifo(tmp_path / "pipe", mode=0o600)
    with pytest.raises(ConfigError, match="is not a file of API keys"):
        KeyRing(tmp_path / "pipe", Clock())


def test_streams_have_rate_headers_too() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        async with openai.completions.with_streaming_response.create(
            model="tiny", prompt="hi", stream=True
        ) as response:
            assert response.headers["x-ratelimit-limit-requests"] == "9"
            await response.text()

    script = [ScriptedToken("a", "stop")]
    converse(ScriptedClient(script=script), conversation, GatewayOptions(rates=Rates(requests_per_min=9)))
