"""One lock around every building of a transformers model, calls in a pool's threads, and a thread that ends with the
one thing that it computes.

While transformers loads a model it replaces methods of its own classes (weight tying, initialization), and puts back
what it found. Two loads that overlap can leave the replacement behind for good: tied weights are then no longer tied,
and a replica that is built after that has other parameters than its peers.

OpenMP, which torch computes with, keeps a team of threads for each thread that has computed. Once there are more of
them than cores, all of them sleep between any two loops, and waking up takes longer than a step of decoding gains from
a second core. So whatever computes now and then must not leave a team behind in a shared pool's threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

BUILDING = threading.RLock()
"""Held around every building and loading of a transformers model."""

T = TypeVar("T")


def in_executor(executor: Executor | None, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Call `work` in a thread of `executor`, or of the event loop's own without one."""
    return asyncio.get_running_loop().run_in_executor(executor, work, *arguments)


async def in_own_thread(work: Callable[..., T], *arguments: object, drop: Callable[[T], None] = lambda _: None) -> T:
    """Run `work` in a thread of its own and return its result. After a cancellation it runs on, and `drop` gets its
    result in that thread."""
    thread, results = ThreadPoolExecutor(1, thread_name_prefix="swarm-once"), list[T]()
    try:
        await asyncio.get_running_loop().run_in_executor(thread, lambda: results.append(work(*arguments)))
    except asyncio.CancelledError:
        thread.submit(lambda: list(map(drop, results)))
        raise
    finally:
        thread.shutdown(wait=False)
    return results[0]
