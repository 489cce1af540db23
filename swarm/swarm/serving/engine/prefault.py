"""The memory of the cache's next pages, asked of the system before a step has to wait for it.

A pool takes no memory until it is written. The system clears what it gives, some megabytes for each tensor of each
block, and on a virtual machine it may have to ask its host for them, which decoding would see as one step in dozens
that takes many times as long as the others. What a long prompt takes beyond what is ahead its own steps wait for.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from swarm.serving.model.kv_pool import KVPool


class Residency:
    """Of the pages of `pool`, which are first used in their order. Owns the thread that asks."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._num_ahead = pool.num_pages_at_once
        self._num_asked = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-residency")

    def keep_ahead(self, num_touched: int) -> None:
        """Beyond the first `num_touched` pages have as many as the system gives at once, or half of them. Returns at
        once."""
        first, end = max(self._num_asked, num_touched), min(num_touched + self._num_ahead, self._pool.num_pages)
        if end - first >= min(-(-self._num_ahead // 2), self._pool.num_pages - first) > 0:
            self._num_asked = end
            self._thread.submit(self._pool.make_resident, first, end)

    def close(self, *, wait: bool) -> None:
        """Ask for nothing more; with `wait`, block until what is asked for has come."""
        self._thread.shutdown(wait=wait, cancel_futures=True)
