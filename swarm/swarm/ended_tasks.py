"""Ends tasks of an event loop."""

from __future__ import annotations

import asyncio
from typing import Any


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended. Their results and errors stay in them."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
