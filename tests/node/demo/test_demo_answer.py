"""The kill comes in mid-answer, however fast the gateway answers."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from rich.console import Console
from swarm_node.demo.command import DemoPlan
from swarm_node.demo.demo_answer import NUM_TOKENS_AFTER, Completion, complete
from swarm_node.demo.display import LineDisplay, Reporter
from swarm_node.demo.nodes import DemoError, DemoState
from swarm_node.events.emitter import Emitter
from uvicorn import Config, Server

PLAN = DemoPlan(min_new_tokens=40)


class FastGateway:
    """Generates `num_early` tokens before the client has read one, and then waits for the kill.

    `misses` says whether it notices.
    """

    def __init__(self, *, num_early: int, misses: bool = True) -> None:
        self.killed = asyncio.Event()
        self.trace: dict[str, Any] = {"hops": [{"peer_id": "first"}, {"peer_id": "last"}], "replays": []}
        self._num_early = num_early
        self._misses = misses

    def kill(self, peer_id: str) -> str:
        assert peer_id == "last"
        self.killed.set()
        return "node-4"

    async def answer(self, num_tokens: int) -> AsyncIterator[str]:
        for index in range(num_tokens if self._misses else PLAN.min_new_tokens + 1):
            if index == self._num_early and self._misses:
                await self.killed.wait()
                self.trace["replays"].append({})
            self.trace["num_tokens"] = index + 1
            yield f"data: {json.dumps({'id': 'a', 'choices': [{'index': 0, 'text': f'{index} '}]})}\n\n"

    @asynccontextmanager
    async def url(self) -> AsyncIterator[str]:
        app = FastAPI()

        @app.post("/v1/completions")
        async def completions(request: Request) -> StreamingResponse:
            asked = await request.json()
            assert asked["ignore_eos"]
            return StreamingResponse(self.answer(asked["max_tokens"]), media_type="text/event-stream")

        @app.get("/v1/traces/a")
        async def trace() -> dict[str, Any]:
            return self.trace

        server = Server(Config(app, port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


def completion_by(**gateway: Any) -> Completion:
    async def scenario() -> Completion:
        scripted = FastGateway(**gateway)
        state, display = DemoState(num_nodes=4), LineDisplay(Console(file=io.StringIO()))
        async with scripted.url() as url:
            return await complete(url, "m", PLAN, Reporter(state, display, Emitter(json=False)), scripted.kill)

    return asyncio.run(scenario())


@pytest.mark.parametrize("num_early", [8, 40, 500])
def test_answer_goes_on_until_the_killed_node_was_missed(num_early: int) -> None:
    completion = completion_by(num_early=num_early)
    assert completion.killed == "node-4"
    assert completion.failover_ms > 0
    assert completion.num_tokens >= min(PLAN.room_tokens, max(PLAN.min_new_tokens, num_early + NUM_TOKENS_AFTER))
    assert completion.text == "".join(f"{index} " for index in range(completion.num_tokens))


def test_answer_that_is_over_before_is_an_error() -> None:
    with pytest.raises(DemoError, match="ended before the killed node was noticed"):
        completion_by(num_early=0, misses=False)
