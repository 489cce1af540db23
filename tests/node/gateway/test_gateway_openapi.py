"""`/openapi.json` is correct: schemathesis sends about 1,000 requests to the real routes over a scripted swarm."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from node.gateway.scripted_client import ScriptedClient, converse
from openai import AsyncOpenAI
from starlette.testclient import TestClient
from swarm_node.gateway.app import create_app

HERE = Path(__file__).parent


def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """It prints the command that reproduces a finding."""
    told = bytearray()
    hooks = {"SCHEMATHESIS_HOOKS": "node.gateway.openapi_rules", "PYTHONPATH": str(HERE.parents[1])}

    async def conversation(openai: AsyncOpenAI) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", HERE / "schemathesis.toml"),
            *("run", _described(openai), "--no-color", "--checks", "all"),
            cwd=tmp_path,
            env=os.environ | hooks,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        told.extend(said)
        assert process.returncode == 0, said.decode()

    converse(ScriptedClient(), conversation, within_s=110)
    assert b"Tested: 11" in told


def test_unsupported_method_is_refused_with_the_supported_ones() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        for path, methods in (("models", "GET, HEAD"), ("chat/completions", "POST"), ("../health", "GET, HEAD")):
            response = await openai._client.request("TRACE", f"{openai.base_url}{path}")
            assert (response.status_code, response.headers["allow"]) == (405, methods)
            assert response.json()["error"]["message"].endswith(f" here: send {methods.replace(', ', ' or ')}")

    converse(ScriptedClient(), conversation)


def test_bounds_are_described_for_fields_that_accept_null() -> None:
    """Without that, a description allows `n: 0`, which is refused."""

    async def conversation(openai: AsyncOpenAI) -> None:
        schemas: dict[str, Any] = (await openai._client.get(_described(openai))).json()["components"]["schemas"]
        for name in ("ChatRequest", "CompletionRequest"):
            of_n, null = schemas[name]["properties"]["n"]["anyOf"]
            assert (of_n["minimum"], null) == (1, {"type": "null"})
            assert schemas[name]["additionalProperties"] is False
            assert schemas[name]["properties"]["guided_json"]["enum"] == [None]
        assert "tool_call_id" in schemas["ToolMessage"]["required"]

    converse(ScriptedClient(), conversation)


def test_description_is_made_once_however_often_it_is_asked_for() -> None:
    """No rate limits these requests, and each took six times as long as one that is refused."""
    app = create_app(ScriptedClient())
    with patch.object(app, "openapi", wraps=app.openapi) as described:
        answers = [TestClient(app).request(method, "/openapi.json") for method in ("GET", "HEAD", "GET")]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert answers[0].json() == answers[2].json()
    assert described.call_count == 1


def _described(openai: AsyncOpenAI) -> str:
    return str(openai.base_url).replace("/v1/", "/openapi.json")
