"""Ends tasks of an event loop that are not needed any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended. Their results and errors stay in them."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def unless(stopped: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None if `stopped` is set before that, which cancels the work."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(working, stopping)
    return None if working.cancelled() else working.result()
