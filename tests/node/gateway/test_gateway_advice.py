"""Requests that the gateway does not offer get one line that says what to do instead.

Each is what some client sends."""

from __future__ import annotations

import gzip

import openai as api
import pytest
from node.gateway.scripted_client import ScriptedClient, converse
from openai import AsyncAzureOpenAI, AsyncOpenAI


@pytest.mark.parametrize(
    "path",
    [
        *("/chat/completions", "/completions", "/embeddings", "/responses"),
        *("/v1/v1/chat/completions", "/api/v1/chat/completions", "/openai/deployments/tiny/chat/completions"),
    ],
)
def test_error_names_a_base_url_with_anything_but_v1(path: str) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.NotFoundError, match="a base URL that ends with /v1"):
            await openai.with_options(base_url=str(openai.base_url).removesuffix("v1/")).post(
                path, body={}, cast_to=object
            )

    converse(ScriptedClient(), conversation)


def test_client_of_azure_is_told_to_use_one_of_openai() -> None:
    """`AzureOpenAI` adds a path to the base URL, so that the advice about base URLs would be wrong."""

    async def conversation(openai: AsyncOpenAI) -> None:
        for options in ({"base_url": openai.base_url}, {"azure_endpoint": str(openai.base_url).removesuffix("/v1/")}):
            azure = AsyncAzureOpenAI(api_key="none", api_version="2024-10-21", http_client=openai._client, **options)
            with pytest.raises(api.NotFoundError, match="clients of Azure are not supported: use one of OpenAI"):
                await azure.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])

    converse(ScriptedClient(), conversation)


def test_client_of_another_api_is_told_which_one_this_is() -> None:
    """Anthropic's and Ollama's clients ask for these paths."""

    async def conversation(openai: AsyncOpenAI) -> None:
        for path in ("/v1/messages", "/api/chat", "/v1/rerank"):
            url = str(openai.base_url).removesuffix("/v1/") + path
            error = (await openai._client.post(url, json={})).json()["error"]
            assert error["message"] == (
                f"there is no POST {path} here: this gateway serves a part of OpenAI's API, "
                "and /openapi.json lists all routes"
            )

    converse(ScriptedClient(), conversation)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "send it to /v1/chat/completions: give the client a base URL that ends with /v1"),
        ("/v1/v1/models", "send it to /v1/models: give the client a base URL that ends with /v1"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/completions/", "did you mean /v1/completions?"),
        ("/v1/embedding", "did you mean /v1/embeddings?"),
        ("/healthz", "did you mean /health?"),
    ],
)
def test_path_that_is_nearly_one_is_told_which(path: str, meant: str) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        url = str(openai.base_url).removesuffix("/v1/") + path
        error = (await openai._client.post(url, json={})).json()["error"]
        assert error["message"].startswith(f"there is no POST {path} here: {meant}")

    converse(ScriptedClient(), conversation)


@pytest.mark.parametrize(("method", "path"), [("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/health")])
def test_path_that_is_not_under_v1_is_named(method: str, path: str) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        error = (await openai._client.request(method, f"{openai.base_url}{path[1:]}")).json()["error"]
        assert error["message"] == f"there is no {method} /v1{path} here: did you mean {path}?"

    converse(ScriptedClient(), conversation)


def test_upload_to_a_path_that_is_not_here_is_told_so() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        for path, status in (("audio/transcriptions", 404), ("models", 405), ("completions", 415)):
            answer = await openai._client.post(f"{openai.base_url}{path}", files={"file": b"x"})
            assert answer.status_code == status

    converse(ScriptedClient(), conversation)


def test_compressed_body_is_refused_as_such() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        body = gzip.compress(b'{"model": "tiny", "prompt": "hi"}')
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        refused = await openai._client.post(f"{openai.base_url}completions", content=body, headers=headers)
        assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "identity")
        assert refused.json()["error"]["message"] == "send the body uncompressed, without content-encoding"

    converse(ScriptedClient(), conversation)


def test_path_with_a_slash_too_many_is_not_redirected() -> None:
    """The redirect would name this server's own scheme, which is http behind a proxy that ends TLS."""

    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai._client.post(f"{openai.base_url}completions/", json={})
        assert answer.status_code == 404
        assert "there is no POST /v1/completions/ here" in answer.json()["error"]["message"]

    converse(ScriptedClient(), conversation)
