"""The guide's snippets for training around a served model, run unchanged over real libp2p hosts from a synchronous
program.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
from support.leaks import no_leaks
from support.network_worlds import eventually, libp2p_node
from swarm.client import Client
from swarm.network.membership import Membership
from swarm.serving.server.span_server import SpanServer
from swarm_protocol.errors import SessionError

GUIDE = (Path(__file__).parents[3] / "docs/guides/around-a-model.md").read_text(encoding="utf-8")


def test_soft_prompt_snippet_lowers_its_loss_over_libp2p(
    llama_dir: Path, tmp_path: Path, make_node_record: Any
) -> None:
    [snippet] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)

    def research(addr: str) -> list[float]:
        torch.manual_seed(0)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(snippet.replace("ADDR", addr), "around-a-model.md", "exec"), {})
        with Client(peers=[addr]) as client:
            x = client.embed("abc", model="tiny").requires_grad_()
            assert client.decode(client.tokenize("abc", model="tiny"), model="tiny") == "abc"
            y = client.forward(x, model="tiny")
        with pytest.raises(SessionError, match="closed"):
            y.sum().backward()
        return [float(line) for line in printed.getvalue().split()]

    async def main() -> list[float]:
        async with AsyncExitStack() as stack:
            seed = await libp2p_node(tmp_path / "seed", network_id="swarm")
            stack.push_async_callback(seed.close)
            addrs = await seed.addrs()
            memberships = []
            for index, (start, end) in enumerate([(0, 3), (3, 6)]):
                network = await libp2p_node(tmp_path / f"s{index}", network_id="swarm", peers=addrs)
                stack.push_async_callback(network.close)
                memberships.append(await stack.enter_async_context(Membership(network)))
                memberships[-1].announce(make_node_record())
                server = SpanServer(network, memberships[-1], llama_dir, name="tiny", start=start, end=end)
                await server.start()
                stack.push_async_callback(server.close)

            async def all_known() -> bool:
                return len(await memberships[0].servers("tiny")) == 2

            await eventually(all_known)
            return await asyncio.to_thread(research, addrs[0])

    # the first uvloop of a process leaves a pipe for signals open
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as first:
        first.run(asyncio.sleep(0))
    with no_leaks(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        losses = runner.run(main())
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.2
