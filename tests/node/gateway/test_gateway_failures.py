"""Bad requests, lost servers and clients that leave: each has its status and form, and nothing stays open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai as api
import pytest
from fastapi import FastAPI
from node.gateway.scripted_client import Hang, ScriptedClient, ScriptedModel, ScriptedToken, converse
from openai import AsyncOpenAI
from openai.types import Completion
from starlette.types import Message
from swarm.client import NoChain, NoRoom
from swarm.client.request import ContextExceeded
from swarm.serving.sampling.sampling import MAX_STOPS
from swarm_node.gateway import admission, http_limits
from swarm_node.gateway.answering import until_gone
from swarm_node.gateway.app import GatewayOptions
from swarm_node.gateway.metrics import TraceStore
from swarm_node.http import server
from swarm_node.http.server import listen, serving
from swarm_protocol.errors import ConfigError, IntegrityError, PeerRefused, SessionError, StartError

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
LARGE_BODY = json.dumps({"model": "tiny", "prompt": "x" * 1500}).encode()
LARGE = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(LARGE_BODY), LARGE_BODY)
)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def _refusal(client: ScriptedClient, path: str, request: dict[str, Any]) -> api.APIStatusError:
    """Return the error of the response to `request`."""
    caught: list[api.APIStatusError] = []

    async def conversation(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.APIStatusError) as error:
            await openai.post(path, body=request, cast_to=object)
        caught.append(error.value)

    converse(client, conversation)
    body = caught[0].body
    assert isinstance(body, dict)
    assert set(body) == {"message", "type", "param", "code"}
    return caught[0]


@pytest.mark.parametrize("field", ["n", "stop", "seed", "temperature", "logprobs", "stream_options", "max_tokens"])
def test_completion_with_a_null_field_takes_its_default(field: str) -> None:
    client = ScriptedClient()

    async def conversation(openai: AsyncOpenAI) -> None:
        for more in ({}, {field: None}):
            await openai.post("/completions", body={"model": "tiny", "prompt": "hi", **more}, cast_to=object)

    converse(client, conversation)
    without, with_null = [replace(each, sampling=replace(each.sampling, seed=1)) for each in client.asked]
    assert with_null == without


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 3),
        ("top_p", 0),
        ("max_tokens", 0),
        ("max_tokens", 10**10),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("stream", "perhaps"),
        ("model", ""),
        ("prompt", 5),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [1, "a"]),
        ("prompt", [-1]),
        ("prompt", ["a"] * 17),
        ("n", 0),
        ("n", 17),
        ("logprobs", 6),
    ],
)
def test_completion_with_an_absurd_value_names_the_field(field: str, value: object) -> None:
    error = _refusal(ScriptedClient(), "/completions", {"model": "tiny", "prompt": "hi", field: value})
    assert (error.status_code, error.type) == (400, "invalid_request_error")
    assert error.param is not None
    assert error.param.split(".")[0] == field


def test_body_that_is_no_json_is_refused() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        url = f"{openai.base_url}completions"
        for content in (b"{", b"\xff\xfe", b'"text"', b""):
            response = await openai._client.post(url, content=content, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"

    converse(ScriptedClient(), conversation)


@pytest.mark.parametrize(
    ("content", "param", "message"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            "messages.0.content.0.type",
            "it is 'image_url', and not 'text'",
        ),
        ([{"type": "text"}], "messages.0.content.0.text", "it is missing"),
        (5, "messages.0.content", "it is 5, and not a string or a list"),
    ],
)
def test_content_of_another_kind_is_refused_by_the_path_that_was_sent(content: Any, param: str, message: str) -> None:
    request = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    error = _refusal(ScriptedClient(), "/chat/completions", request)
    assert (error.status_code, error.param) == (400, param)
    assert f"{param}: {message}" in error.message


def test_message_of_an_unknown_role_or_that_is_no_object_is_refused_by_its_place() -> None:
    def refused(body: Any) -> tuple[str | None, str]:
        error = _refusal(ScriptedClient(), "/chat/completions", body)
        assert (error.status_code, error.code) == (400, "invalid_value")
        return error.param, error.message

    def message(**fields: object) -> dict[str, Any]:
        return {"model": "tiny", "messages": [fields]}

    param, text = refused(message(role="wizard", content="hi"))
    assert param == "messages.0.role"
    assert "it is 'wizard', and not one of 'system', 'developer', 'user', 'assistant', 'tool'" in text
    assert refused(message(role=["user"], content="hi"))[0] == "messages.0.role"
    param, text = refused(message(role=None, content="hi"))
    assert (param, "messages.0.role: it is null" in text) == ("messages.0.role", True)
    param, text = refused(message(content="hi"))
    assert (param, "messages.0.role: it is missing" in text) == ("messages.0.role", True)
    param, text = refused({"model": "tiny", "messages": ["hi"]})
    assert (param, "messages.0: it is 'hi', and not a JSON object" in text) == ("messages.0", True)
    param, text = refused(["hi"])
    assert (param, "the request body is a list, and not a JSON object" in text) == (None, True)


def test_unknown_model_is_not_found_and_the_served_ones_are_named() -> None:
    error = _refusal(ScriptedClient(), "/completions", {"model": "huge", "prompt": "hi"})
    assert (error.status_code, error.code, error.param) == (404, "model_not_found", "model")
    assert "'tiny'" in error.message


def test_unknown_route_and_trace_are_not_found() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        for path in ("/nothing", "/traces/nothing"):
            with pytest.raises(api.NotFoundError) as error:
                await openai.get(path, cast_to=object)
            assert error.value.code == "not_found"
            assert path.removeprefix("/traces/") in error.value.message
            assert "/openapi.json" in error.value.message or path.startswith("/traces/")

    converse(ScriptedClient(), conversation)


def test_pages_answer_to_head_as_to_get() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        for path in ("/models", "/models/tiny", "../health"):
            for request in (openai._client.head, openai._client.get):
                assert (await request(str(openai.base_url) + path.lstrip("/"))).status_code == 200

    converse(ScriptedClient(), conversation)


def test_empty_body_is_called_empty_and_a_format_s_field_is_named_as_it_was_sent() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        address = f"{openai.base_url}chat/completions"
        empty = await openai._client.post(address, headers={"content-type": "application/json"})
        assert empty.json()["error"]["message"] == "the request body is empty: send a JSON object"

    converse(ScriptedClient(), conversation)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    error = _refusal(ScriptedClient(), "/chat/completions", {**body, "response_format": {"type": "json_schema"}})
    assert error.param == "response_format.json_schema"


def test_model_with_missing_blocks_is_unavailable_and_names_them() -> None:
    client = ScriptedClient(served=[ScriptedModel(missing=[(0, 1), (2, 4)])])
    error = _refusal(client, "/completions", {"model": "tiny", "prompt": "hi"})
    assert error.status_code == 503
    assert "nobody serves blocks 0:1, 2:4 of 4" in error.message
    assert float(error.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("failure", "status", "retry_after"),
    [
        (PeerRefused("no free pages", retry_after_s=3.2), 429, "4"),
        (NoRoom("no server has room", remedy="", missing=((0, 4),)), 429, "2"),
        (NoChain("nobody serves them", remedy="", missing=((0, 4),)), 503, "2"),
        (PeerRefused("not served"), 503, "2"),
        (SessionError("the session failed"), 503, "2"),
        (ConfigError("the prompt is too long"), 400, None),
        (RuntimeError("secret /home/someone"), 500, None),
        (IntegrityError("secret /home/someone/tokenizer.json is damaged"), 500, None),
    ],
)
def test_failure_before_the_first_token_has_its_status(
    failure: Exception, status: int, retry_after: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    client = ScriptedClient(script=[failure])
    for stream in (False, True):
        error = _refusal(client, "/completions", {"model": "tiny", "prompt": "hi", "stream": stream})
        assert error.status_code == status
        assert "secret" not in error.message
        assert error.response.headers.get("retry-after") == retry_after
    assert (str(failure) in caplog.text) == (status == 500)


@pytest.mark.parametrize(("path", "body"), [("/completions", {"prompt": "hi"}), ("/chat/completions", MESSAGES)])
def test_failure_of_a_field_names_it_as_the_client_sent_it(path: str, body: dict[str, Any]) -> None:
    [text] = body
    named = {
        ContextExceeded("too long", field="prompt"): text,
        ConfigError("too few", field="min_tokens"): "min_tokens",
    }
    for failure, param in {**named, ConfigError("no"): None}.items():
        error = _refusal(ScriptedClient(script=[failure]), path, {"model": "tiny", **body})
        assert (error.status_code, error.param) == (400, param)


def test_failure_after_the_first_token_is_an_event_in_the_stream() -> None:
    texts: list[str] = []

    async def conversation(openai: AsyncOpenAI) -> None:
        stream = await openai.completions.create(model="tiny", prompt="hi", stream=True)
        with pytest.raises(api.APIError, match="nobody is left"):
            await _collect(stream, texts)

    converse(ScriptedClient(script=[ScriptedToken("a"), SessionError("nobody is left")]), conversation)
    assert texts == ["a"]


def test_openai_s_client_asks_again_for_a_stream_that_fails_before_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would not if the headers were there: it raises an error within a stream."""
    full = NoRoom("no server has room", remedy="", missing=((0, 4),))
    client = ScriptedClient(scripts=[[full], [ScriptedToken("a"), full]])
    waits: list[str] = []

    async def wait(_client: AsyncOpenAI, *, response: Any, **_: Any) -> None:
        waits.append(response.headers["retry-after"])

    monkeypatch.setattr(AsyncOpenAI, "_sleep_for_retry", wait)

    async def conversation(openai: AsyncOpenAI) -> None:
        texts: list[str] = []
        patient = openai.with_options(max_retries=2)
        stream = await patient.completions.create(model="tiny", prompt="hi", stream=True)
        with pytest.raises(api.APIError, match="no server has room"):
            await _collect(stream, texts)
        assert (texts, waits, len(client.asked)) == (["a"], ["2"], 2)

    converse(client, conversation)


async def _collect(stream: api.AsyncStream[Completion], texts: list[str]) -> None:
    async for chunk in stream:
        texts.append(chunk.choices[0].text)


def test_request_beyond_the_capacity_is_refused_with_a_retry_time() -> None:
    client = ScriptedClient(script=[ScriptedToken("a"), Hang()])

    async def conversation(openai: AsyncOpenAI) -> None:
        stream = await openai.completions.create(model="tiny", prompt="hi", stream=True)
        with pytest.raises(api.RateLimitError) as error:
            await openai.completions.create(model="tiny", prompt="hi")
        assert error.value.response.headers["retry-after"] == "2"
        await stream.close()

    converse(client, conversation, GatewayOptions(max_requests=1))


def test_body_over_the_bound_is_refused_with_and_without_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "MAX_HTTP_BODY_BYTES", 1000)

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    async def conversation(openai: AsyncOpenAI) -> None:
        for content in (b"x" * 1001, pieces()):
            response = await openai._client.post(f"{openai.base_url}completions", content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"

    converse(ScriptedClient(), conversation)


@pytest.mark.parametrize(
    ("values", "is_refused"),
    [
        (["[]"] * 200, True),
        (['{"":{}}'] * 70, True),
        (['"a"'] * 200, True),
        (['"' + "[{" * 200 + r"\"[\\" + '"'], False),
        (["1"] * 1000, False),
    ],
)
def test_body_of_too_many_values_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch, values: list[str], is_refused: bool
) -> None:
    """Otherwise 4 MB of `[],` or of small tool calls would take hundreds of megabytes, or a second of the loop."""
    monkeypatch.setattr(http_limits, "MAX_HTTP_VALUES", 100)
    content = f'{{"metadata": [{",".join(values)}]}}'

    async def conversation(openai: AsyncOpenAI) -> None:
        for encoding in ("utf-8", "utf-16") if is_refused else ("utf-8",):
            response = await openai._client.post(
                f"{openai.base_url}completions",
                content=content.encode(encoding),
                headers={"content-type": "application/json"},
            )
            assert response.status_code == (413 if is_refused else 400)
            assert ("objects, lists and strings" in response.text) == is_refused

    converse(ScriptedClient(), conversation)


@asynccontextmanager
async def two_large_bodies(openai: AsyncOpenAI) -> AsyncIterator[tuple[asyncio.Future[bytes], asyncio.StreamWriter]]:
    """Send two bodies except for their last byte; one is refused. Yield the other's status and writer."""
    begun = [await asyncio.open_connection(openai.base_url.host, openai.base_url.port) for _ in range(2)]
    for _, writer in begun:
        writer.write(LARGE[:-1])
    statuses = [asyncio.ensure_future(reader.readline()) for reader, _ in begun]
    [refused], [waiting] = await asyncio.wait(statuses, return_when=asyncio.FIRST_COMPLETED)
    assert b" 429 " in refused.result()
    yield waiting, begun[statuses.index(waiting)][1]
    waiting.cancel()
    for _, writer in begun:
        writer.close()
        await writer.wait_closed()


def test_large_bodies_that_arrive_at_the_same_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "MAX_ARRIVING_BYTES", 2000)
    monkeypatch.setattr(http_limits, "SMALL_HTTP_BODY_BYTES", 1000)

    async def conversation(openai: AsyncOpenAI) -> None:
        async with two_large_bodies(openai) as (waiting, writer):
            await openai.completions.create(model="tiny", prompt="small ones come in addition")
            writer.write(LARGE[-1:])
            assert b" 200 " in await waiting

    converse(ScriptedClient(script=[ScriptedToken("a", "stop")]), conversation)


def test_large_bodies_of_one_address_leave_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a caller that sends them slowly would make the gateway refuse those of all others."""
    monkeypatch.setattr(http_limits, "MAX_ARRIVING_BYTES", 4000)
    monkeypatch.setattr(http_limits, "MAX_ADDRESS_ARRIVING_BYTES", 2000)
    monkeypatch.setattr(http_limits, "SMALL_HTTP_BODY_BYTES", 1000)

    async def conversation(openai: AsyncOpenAI) -> None:
        async with two_large_bodies(openai):
            monkeypatch.setattr(admission, "caller_of", lambda _scope: "another address")
            reader, writer = await asyncio.open_connection(openai.base_url.host, openai.base_url.port)
            writer.write(LARGE)
            assert b" 200 " in await reader.readline()
            writer.close()
            await writer.wait_closed()

    converse(ScriptedClient(script=[ScriptedToken("a", "stop")]), conversation)


def test_body_that_does_not_arrive_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HTTP_BODY_TIMEOUT_S", 0.05)

    async def conversation(openai: AsyncOpenAI) -> None:
        reader, writer = await asyncio.open_connection(openai.base_url.host, openai.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()

    converse(ScriptedClient(), conversation)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [[Hang()], [ScriptedToken("a"), Hang()]])
def test_client_that_disconnects_frees_the_generation(stream: bool, script: list[object]) -> None:
    client = ScriptedClient(script=script)

    async def conversation(openai: AsyncOpenAI) -> None:
        asking = asyncio.create_task(_read_all(openai, stream=stream))
        await client.reached.wait()
        assert client.num_open == 1
        asking.cancel()
        await asyncio.wait([asking])
        await _until(lambda: client.num_open == 0)

    converse(client, conversation)


async def _read_all(openai: AsyncOpenAI, *, stream: bool) -> None:
    answer = await openai.completions.create(model="tiny", prompt="hi", stream=stream)
    if isinstance(answer, api.AsyncStream):
        async for _chunk in answer:
            pass


def test_client_that_stops_reading_frees_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HTTP_WRITE_TIMEOUT_S", 0.05)
    client = ScriptedClient(script=[ScriptedToken("x" * 10_000)] * 10_000)

    async def conversation(openai: AsyncOpenAI) -> None:
        _reader, writer = await asyncio.open_connection(openai.base_url.host, openai.base_url.port, limit=1)
        request = b'{"model":"tiny","prompt":"hi","stream":true}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(request)}\r\n"
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + request)
        await _until(lambda: client.num_open == 1)
        await _until(lambda: client.num_open == 0)
        writer.transport.abort()

    converse(client, conversation)


def test_generation_over_its_time_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "GENERATION_TIMEOUT_S", 0.05)
    error = _refusal(ScriptedClient(script=[Hang()]), "/completions", {"model": "tiny", "prompt": "hi"})
    assert (error.status_code, error.code) == (503, "timeout")


def test_occupied_port_names_the_port_and_the_remedy() -> None:
    async def main() -> None:
        async with serving(FastAPI(), listen("127.0.0.1", 0)) as url:
            port = int(url.rsplit(":", 1)[1])
            with pytest.raises(StartError, match=rf"port {port}.*choose another --port"):
                listen("127.0.0.1", port)

    asyncio.run(main())


def test_trace_store_drops_the_oldest_beyond_its_capacity() -> None:
    store = TraceStore(capacity=2)
    for name in ("a", "b", "c"):
        store.begin(name, lambda name=name: {"is": name})
    assert store.get("a") is None
    assert store.get("c") == {"is": "c"}
    assert len(store) == 2
    assert http_limits.MAX_KEPT_TRACES > 2


def test_trace_store_keeps_a_finished_trace_as_it_was() -> None:
    value = {"tokens": 1}
    store = TraceStore()
    store.begin("a", lambda: dict(value))
    store.finish("a")
    value["tokens"] = 2
    assert store.get("a") == {"tokens": 1}


def test_failure_to_watch_the_client_ends_the_answer_and_is_raised() -> None:
    ended = asyncio.Event()

    async def broken() -> Message:
        await asyncio.sleep(0)  # the answer has begun
        raise RuntimeError("the connection broke")

    async def answering() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(RuntimeError, match="the connection broke"):
        asyncio.run(until_gone(broken, answering()))
    assert ended.is_set()
