"""One span in memory, with its cache and the engine that runs it: what a server serves, and replaces when it moves."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from swarm.serving.engine.engine import Engine
from swarm.serving.engine.span_speed import PREFILL_TOKENS, SpanSpeed, step_again_ms
from swarm.serving.model.batch import PAGE_TOKENS
from swarm.serving.model.kv_pool import KVPool
from swarm.serving.model.span_loading import LoadedSpan, load
from swarm.serving.server.server_options import ServerOptions


class Deployment:
    """`run` computes until it is cancelled; `close` gives the memory back."""

    def __init__(self, loaded: LoadedSpan, pool: KVPool, options: ServerOptions, thread: ThreadPoolExecutor) -> None:
        self.loaded = loaded
        self.options = options
        self.engine = Engine(loaded.span, pool, options, revision=loaded.revision, speed=loaded.speed, thread=thread)
        self._running: asyncio.Task[None] | None = None

    @classmethod
    async def load(cls, model_dir: Path, start: int, end: int, options: ServerOptions) -> Deployment:
        """Raises ConfigError or IntegrityError. Cancelled, loading may take minutes more, unseen."""
        # what is measured while loading is the engine's own thread: OpenMP gives each thread a team of its own, and
        # with more teams than cores their members sleep between any two loops. A new thread computes with as many as
        # any thread was told last: while another span is served, with those that its step is worth
        thread = ThreadPoolExecutor(
            1,
            thread_name_prefix="swarm-engine",
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        )
        try:
            loaded, pool = await asyncio.get_running_loop().run_in_executor(
                thread, _load, model_dir, start, end, options
            )
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(loaded, pool, options, thread)

    @property
    def speed(self) -> SpanSpeed:
        """As measured while loading, and observed since."""
        assert self.engine.observed is not None
        return self.engine.observed.speed

    async def measure_again(self) -> None:
        """Measure the span while nobody uses it: a server that is thought slow is asked for little, and sees little.

        What comes meanwhile waits for a few short steps.
        """
        assert self.engine.observed is not None
        decode_ms = await self.engine.in_thread(step_again_ms, self.loaded.span, 1)
        prefill_ms = await self.engine.in_thread(step_again_ms, self.loaded.span, PREFILL_TOKENS)
        self.engine.observed.measured_again(decode_ms, prefill_ms)

    @property
    def blocks(self) -> tuple[int, int]:
        return self.loaded.span.start, self.loaded.span.end

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """A defect of the engine ends the group."""
        self._running = tasks.create_task(self.engine.run(), name="engine")

    async def close(self) -> None:
        """End its seats and wait for what runs. Idempotent. Cancelled, what runs ends by itself."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        await asyncio.get_running_loop().run_in_executor(None, partial(self.engine.close, wait=True))


def _load(model_dir: Path, start: int, end: int, options: ServerOptions) -> tuple[LoadedSpan, KVPool]:
    loaded = load(model_dir, start, end, options)
    return loaded, loaded.span.new_pool(loaded.kv_tokens // PAGE_TOKENS)
