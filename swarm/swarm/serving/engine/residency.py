"""The memory of the cache's next pages, asked of the system before a step has to wait for it.

A pool takes no memory until it is written. The system clears what it gives, some megabytes at a time for all blocks,
and on a virtual machine it may have to ask its host for them: a step that waited for that took 50 ms instead of 8.
"""

from __future__ import annotations

import asyncio

from swarm.serving.model.kv_pool import KVPool


class Residency:
    """Of the pages of `pool`, which are first used in their order."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._ahead = pool.huge_page
        self._num_pages = 0

    def keep_ahead(self, num_touched: int) -> None:
        """Beyond the first `num_touched` pages have as many as the system gives at a time, or half of them. Asks in
        another thread, and waits for nothing. In a running loop."""
        first, end = max(self._num_pages, num_touched), min(num_touched + self._ahead, self._pool.num_pages)
        if end - first >= min(-(-self._ahead // 2), self._pool.num_pages - first) > 0:
            self._num_pages = end
            asyncio.get_running_loop().run_in_executor(None, self._pool.make_resident, first, end)
