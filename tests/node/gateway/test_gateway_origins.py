"""Pages of other origins, in a browser: what their requests need and get (CORS).

OpenAI's client for JavaScript with `dangerouslyAllowBrowser`, and `fetch` with a stream, were run in a page by hand.
These tests send what a browser sends for them.
"""

from __future__ import annotations

from pathlib import Path

from node.gateway.scripted_client import ScriptedClient, ScriptedToken, converse
from openai import AsyncOpenAI
from swarm_node.gateway.admission import KeyRing
from swarm_node.gateway.app import GatewayOptions

KEY = "key-of-anne-0123456789"
PAGE = "http://localhost:5173"
ASKED = "authorization,content-type,x-stainless-retry-count"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": ASKED}


def _options(tmp_path: Path, *origins: str) -> GatewayOptions:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text(f"anne {KEY}\n")
    return GatewayOptions(keys=KeyRing(file, lambda: 0.0), allowed_origins=origins)


def test_page_of_another_origin_gets_no_permission_by_default() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        url = f"{openai.base_url}completions"
        asked = await openai._client.options(url, headers={"origin": PAGE, **PREFLIGHT})
        assert asked.status_code == 405
        assert asked.json()["error"]["message"].endswith("only if --allowed-origins names it")
        answered = await openai._client.get(f"{openai.base_url}models", headers={"origin": PAGE})
        for response in (asked, answered):
            assert "access-control-allow-origin" not in response.headers

    converse(ScriptedClient(), conversation)


def test_page_of_an_allowed_origin_may_send_a_key_and_read_streams_and_errors(tmp_path: Path) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        url, sent = f"{openai.base_url}completions", {"origin": PAGE, "authorization": f"Bearer {KEY}"}
        asked = await openai._client.options(url, headers={"origin": PAGE, **PREFLIGHT})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-headers"] == ASKED
        streamed = await openai._client.post(url, headers=sent, json={"model": "tiny", "prompt": "hi", "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        wrong = await openai._client.post(url, headers=sent, json={"model": "tiny"})
        stranger = await openai._client.post(url, headers={"origin": PAGE}, json={"model": "tiny"})
        assert (wrong.status_code, stranger.status_code) == (400, 401)
        for response in (asked, streamed, wrong, stranger):
            assert response.headers["access-control-allow-origin"] == PAGE
            assert "Origin" in response.headers["vary"]
        # for `request_id` and the wait until a retry, which OpenAI's client reads from headers
        assert streamed.headers["access-control-expose-headers"] == "*"

    converse(ScriptedClient(script=[ScriptedToken("a", "stop")]), conversation, _options(tmp_path, PAGE))


def test_page_of_an_origin_that_is_not_named_gets_no_permission(tmp_path: Path) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        for origin in ("http://localhost:5174", "https://localhost:5173", "null"):
            asked = await openai._client.options(
                f"{openai.base_url}completions", headers={"origin": origin, **PREFLIGHT}
            )
            assert asked.status_code == 400
            assert "access-control-allow-origin" not in asked.headers

    converse(ScriptedClient(), conversation, _options(tmp_path, PAGE))


def test_with_a_star_pages_of_all_origins_are_allowed(tmp_path: Path) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        asked = await openai._client.options(
            f"{openai.base_url}completions", headers={"origin": "https://a.example", **PREFLIGHT}
        )
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "*")

    converse(ScriptedClient(), conversation, _options(tmp_path, "*"))
