"""Runs the steps of all sessions, one at a time, in one thread of its own.

Sessions take turns: each has at most one step waiting, and steps run in the order in which they came. This is the seam
for batching: the queue holds what a step is (`Step`), not how to run it, so several can be run as one.

`run` is the task that takes from the queue; `submit` leaves it a step and waits.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.serving.blocks import KVCache, Span, Want


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Append `x` to `cache` at `position`, where the cache ends."""

    span: Span
    cache: KVCache
    position: int
    x: Tensor
    want: Want


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """`output` is float32 on the CPU, or None if nothing was wanted."""

    output: Tensor | None
    compute_ms: float
    queue_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """`since_s` is of the loop's clock."""

    step: Step
    since_s: float
    done: asyncio.Future[Done]


class Engine:
    """`num_done` counts steps, `num_tokens` the positions in them."""

    def __init__(self) -> None:
        self.num_done = 0
        self.num_tokens = 0
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-engine")

    @property
    def thread(self) -> ThreadPoolExecutor:
        """For what must not run beside a step: loading weights, measuring."""
        return self._thread

    @property
    def num_waiting(self) -> int:
        return self._queue.qsize()

    async def submit(self, step: Step) -> Done:
        """Cancelling it takes the step from the queue; one that has begun runs to its end, unseen."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(step=step, since_s=loop.time(), done=loop.create_future())
        self._queue.put_nowait(waiting)
        return await waiting.done

    async def run(self) -> None:
        """Until cancelled. A step that fails fails its submitter only."""
        while True:
            # in a call of its own, so that no variable here keeps a session's cache alive until the next step
            await self._run_one(await self._queue.get())

    async def _run_one(self, waiting: _Waiting) -> None:
        step, done = waiting.step, waiting.done
        if done.done():
            return
        loop = asyncio.get_running_loop()
        queue_ms = (loop.time() - waiting.since_s) * 1000
        try:
            output, compute_ms = await loop.run_in_executor(self._thread, _run, step)
        except Exception as error:  # a bug or an exhausted device: the session's to report, and no one else's
            if not done.done():
                done.set_exception(error)
            return
        self.num_done += 1
        self.num_tokens += step.x.shape[0]
        if not done.done():
            done.set_result(Done(output=output, compute_ms=compute_ms, queue_ms=queue_ms))

    def close(self, *, wait: bool) -> None:
        """Take nothing more; with `wait`, block until what runs in the thread has ended."""
        self._thread.shutdown(wait=wait, cancel_futures=True)


def _run(step: Step) -> tuple[Tensor | None, float]:
    since = time.perf_counter()
    output = step.span.run(step.x, step.cache, step.want)
    if output is not None:
        output = output.to("cpu", torch.float32)
    return output, (time.perf_counter() - since) * 1000
