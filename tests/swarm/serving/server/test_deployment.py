"""A span that is loaded for a server."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from swarm.serving.server.deployment import Deployment
from swarm.serving.server.server_options import ServerOptions


def test_load_while_another_span_steps_with_fewer_threads_may_use_all(llama_dir: Path) -> None:
    usual = torch.get_num_threads()

    async def load() -> int:
        deployment = await Deployment.load(llama_dir, 2, 4, ServerOptions(kv_bytes=2**20))
        await deployment.close()
        return deployment.loaded.span.num_threads

    with ThreadPoolExecutor(1) as stepping:
        stepping.submit(torch.set_num_threads, usual + 1).result()
        try:
            assert asyncio.run(load()) == usual
        finally:
            stepping.submit(torch.set_num_threads, usual).result()
