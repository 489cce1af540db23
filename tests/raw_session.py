"""A client of one server that writes the messages itself, so that tests can send what no client would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from swarm.serving.tensors import pack
from swarm_protocol.serving_messages import SESSION_METHOD, Open, Ready, Step, StepResult

SESSION = f"{SESSION_METHOD}/tiny"
TOKENS = torch.tensor([5, 6, 7])
HIDDEN = torch.zeros(2, 32)


def opening(box: Any, **changes: Any) -> Open:
    server = next(iter(box.servers.values()))
    values = {
        "session_id": "s",
        "model": "tiny",
        "revision": server.record.revision,
        "start": server.start_block,
        "end": server.end_block,
        "max_tokens": 16,
    }
    return Open(**{**values, **changes})


@asynccontextmanager
async def session(box: Any, index: int = 0, **changes: Any) -> AsyncIterator[Any]:
    """An open stream to a server that has answered Ready."""
    async with box.network.stream(box.who[f"s{index}"], SESSION, timeout_s=600) as stream:
        await stream.send(opening(box, **changes).to_bytes())
        Ready.from_bytes(await stream.receive())
        yield stream


async def ask(stream: Any, x: torch.Tensor, position: int = 0, want: str = "all") -> StepResult:
    await stream.send(Step(position=position, want=want, tensor=pack(x)).to_bytes())
    return StepResult.from_bytes(await stream.receive())
