"""`swarm-node models` and `swarm-node chat` against a server of its own process."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

from support.serving_fleet import ServingFleet, serving_fleet
from support.tiny_models import FAMILIES, write_model
from swarm_node.demo import demo_answer

END_S = 60.0
CONTEXT_TOKENS = 16384
"""Longer than any test waits for an answer."""


async def swarm_node(*arguments: str, text: str = "") -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm_node", *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(END_S):
        out, err = await process.communicate(text.encode())
    return process.returncode, out.decode(), err.decode()


async def until(line: bytes, terminal: int) -> bytes:
    """What a program writes to its terminal, up to and with `line`."""
    seen = b""
    async with asyncio.timeout(END_S):
        while line not in seen:
            seen += await asyncio.to_thread(os.read, terminal, 4096)
    return seen


async def chat_in_terminal(*arguments: str) -> None:
    """Ask, stop the answer by Ctrl-C as soon as it begins, and end by Ctrl-D."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm_node", "chat", *arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "dumb"},  # no sequences between question and answer
    )
    os.close(theirs)
    await until(b"> ", ours)
    os.write(ours, b"def add(a, b):\n")
    await until(b"):\r\n", ours)
    assert await asyncio.to_thread(os.read, ours, 1), "an answer has begun"
    process.send_signal(signal.SIGINT)
    await until(b"\n> ", ours)
    os.write(ours, b"\x04")
    async with asyncio.timeout(END_S):
        assert await process.wait() == 0
    os.close(ours)


def test_models_are_listed_and_one_answers_in_a_pipe_and_in_a_terminal(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.max_position_embeddings, config.eos_token_id = CONTEXT_TOKENS, None
    model = write_model(tmp_path / "tiny", config)

    async def main() -> None:
        async with serving_fleet(tmp_path, model, [(0, 6)], "--threads", "1") as servers:
            peers = ("--home", str(tmp_path / "asking"), "--peers", servers.state.node("seed").addrs[0])
            revision = await check_models(servers, peers)
            ended = await swarm_node(
                *("chat", f"tiny@{revision}", "--temperature", "0", "--max-tokens", "12", *peers), text="def add("
            )
            expected = await asyncio.to_thread(demo_answer.complete_undisturbed, model, "def add(", 12)
            assert (ended[0], ended[1]) == (0, expected + "\n"), ended
            assert "has no chat template" in ended[2]
            await chat_in_terminal("tiny", "--max-tokens", str(CONTEXT_TOKENS - 100), *peers)

    asyncio.run(main())


async def check_models(servers: ServingFleet, peers: tuple[str, ...]) -> str:
    """Returns the revision."""
    code, out, err = await swarm_node("models", "--json", *peers)
    assert code == 0, err
    (tiny,) = json.loads(out)["models"]
    assert (tiny["name"], tiny["served"], tiny["num_servers"], tiny["context_tokens"]) == (
        *("tiny", [[0, 6]], 1),
        CONTEXT_TOKENS,
    )
    (serving,) = (await servers.client.servers("tiny")).values()
    assert tiny["revision"] == serving.revision
    return str(tiny["revision"])
