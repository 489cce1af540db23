"""Describes the tasks that a loop still has, for error messages. Pure."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def describe(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Return the name of each task and the line at which it waits, sorted so that the message is always the same."""
    return "; ".join(sorted(f"{task.get_name()} at {_where(task)}" for task in tasks)) or "no task"


def _where(task: asyncio.Task[Any]) -> str:
    """Return the innermost line at which a task waits outside asyncio."""
    awaited: Any = task.get_coro()
    frames = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            frames.append(frame)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    own = [frame for frame in frames if f"{os.sep}asyncio{os.sep}" not in frame.f_code.co_filename] or frames
    if not own:
        return "an unknown place"
    return f"{own[-1].f_code.co_name} ({Path(own[-1].f_code.co_filename).name}:{own[-1].f_lineno})"
