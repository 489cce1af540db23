"""A thread that waits for a call in the client's loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import pytest
from swarm.client.tensor_calls import waiting_for


class EndsAtALook(Future[int]):
    """A future that finishes at the moment in which a wait for it times out."""

    def result(self, timeout: float | None = None) -> int:
        value = super().result()
        if timeout is not None:
            raise TimeoutError
        return value


def test_call_that_ends_as_its_wait_times_out_gives_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> int:
        return 7

    def submitted(coroutine: Coroutine[Any, Any, int], _loop: object) -> Future[int]:
        coroutine.close()
        future = EndsAtALook()
        threading.Timer(0.05, future.set_result, [7]).start()
        return future

    async def main() -> int:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", submitted)
        found: int = await asyncio.to_thread(waiting_for(asyncio.get_running_loop()), work())
        return found

    assert asyncio.run(main()) == 7
