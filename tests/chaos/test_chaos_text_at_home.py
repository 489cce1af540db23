"""A client, a chat and a gateway that keep text at home, with real servers of the ordinary command, one of them killed.

.venv/bin/python -m pytest tests/chaos/test_chaos_text_at_home.py -m chaos -s
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.node_process import environment
from support.serving_fleet import START_S, ServingFleet, serving_fleet
from swarm.client import AsyncClient, KeptModel
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import initial_theta
from swarm.training.run.run_tables import DEFAULT_MODEL
from swarm.training.state.export import export_hf
from swarm_protocol.rows import TOKENS
from swarm_protocol.session_frames import AnswerTokens, Frame, OpenSequence, StepRequest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

SPANS = ((0, 3), (3, 6), (3, 6))
PROMPT = "def fibonacci(n):\n"
NUM_TOKENS = 48
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    "grammar": {
        "json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 4},
        "temperature": 1.0,
        "seed": 3,
    },
}


def _write_model(directory: Path) -> Path:
    run = RunConfig(name="kept", seed=3, model={**DEFAULT_MODEL, "initializer_range": 0.1})
    export_hf(initial_theta(run), run, directory)
    return directory


async def _tokens(client: AsyncClient, **options: Any) -> list[int]:
    asked = {"model": "kept", "prompt": PROMPT, "max_tokens": NUM_TOKENS, **options}
    return [token.token_id async for token in client.generate(**asked)]


@contextmanager
def _sent_to_servers() -> Iterator[list[Frame]]:
    """Collect the frames that this process sends to other peers, without those to the ends of the model that it runs
    itself."""
    sent: list[Frame] = []
    send = MultiplexedConnection.send

    def sending(self: MultiplexedConnection, frame: Frame) -> None:
        if not self.peer_id.startswith("home/"):
            sent.append(frame)
        send(self, frame)

    with patch.object(MultiplexedConnection, "send", sending):
        yield sent


async def _killed_mid_answer(servers: ServingFleet, client: AsyncClient) -> list[int]:
    generation, tokens = (
        client.generate(model="kept", prompt=PROMPT, max_tokens=NUM_TOKENS, **WAYS["seeded"]),
        list[int](),
    )
    async for token in generation:
        tokens.append(token.token_id)
        if len(tokens) == 9:
            (victim,) = (hop["peer_id"] for hop in generation.trace()["hops"] if hop["start"] == 3)
            servers.kill(servers.find(victim))
    (replay,) = generation.trace()["replays"]
    assert replay["lost_peer"] == victim
    print(f"kill -9 in mid-answer: a pause of {replay['failover_ms']:.0f} ms")
    return tokens


async def _chat(*arguments: object) -> str:
    command = [
        str(Path(sys.executable).with_name("swarm-node")),
        "chat",
        "kept",
        "--temperature",
        "0",
        "--max-tokens",
        "32",
    ]
    process = await asyncio.create_subprocess_exec(
        *command,
        *map(str, arguments),
        env=environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(process.communicate(PROMPT.encode()), 120)
    assert process.returncode == 0
    return out.decode()


def _post(url: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def _gateway(servers: ServingFleet, model: Path, peers: str) -> None:
    await servers.fleet.spawn("gateway", "gateway", "--peers", peers, "--port", "0", "--text-at-home", str(model))
    gateway = servers.state.node("gateway")
    await servers.fleet.until(lambda: bool(gateway.url), within_s=START_S, what="starting the gateway")
    asked = {"model": "kept", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    status, answer = await asyncio.to_thread(_post, f"{gateway.url}/v1/completions", **asked)
    assert status == 200, answer
    text = [token.text async for token in servers.client.generate(model="kept", prompt=PROMPT, max_tokens=32)]
    assert answer["choices"][0]["text"] == "".join(text)
    status, answer = await asyncio.to_thread(_post, f"{gateway.url}/v1/embeddings", model="kept", input="secret")
    assert status == 400
    assert "keeps text at home" in answer["error"]["message"]


def test_text_at_home_gives_the_same_tokens_when_a_server_is_killed(tmp_path: Path) -> None:
    model = _write_model(tmp_path / "kept")

    async def main() -> None:
        async with serving_fleet(tmp_path, model, SPANS, "--threads", "1") as servers:
            peers = servers.state.node("seed").addrs[0]
            ordinary = {way: await _tokens(servers.client, **options) for way, options in WAYS.items()}
            kept = KeptModel(source=model)
            with _sent_to_servers() as sent:
                async with AsyncClient.connect(peers=[peers], text_at_home={"kept": kept}) as client:
                    assert {way: await _tokens(client, **options) for way, options in WAYS.items()} == ordinary
                    assert await _killed_mid_answer(servers, client) == ordinary["seeded"]
            steps = [frame for frame in sent if isinstance(frame, StepRequest)]
            assert len(steps) > 100
            assert {(frame.rows.codec, frame.draw) for frame in steps} == {("raw", None)}
            assert TOKENS not in {frame.rows.codec for frame in steps}
            assert {frame.sampler for frame in sent if isinstance(frame, OpenSequence)} == {None}
            assert not any(isinstance(frame, AnswerTokens) for frame in sent)
            home = tmp_path / "chat-home"
            asked = ("--peers", peers, "--home", home)
            assert await _chat(*asked, "--text-at-home", model, "--blocks-at-home", 2) == await _chat(*asked)
            await _gateway(servers, model, peers)

    asyncio.run(main())
