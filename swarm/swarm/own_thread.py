"""Runs what computes once, while a node starts, in a thread that ends with it.

OpenMP, which torch computes with, keeps a team of threads for each thread that has computed. Once there are more of
them than cores, all of them sleep between any two loops, and waking up takes longer than a step of decoding gains from
a second core. So whatever computes now and then must not leave a team behind in a shared pool's threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


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
