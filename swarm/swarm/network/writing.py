"""Writing to connections that may have been lost a moment ago."""

from __future__ import annotations

import asyncio


def write(writer: asyncio.StreamWriter, *parts: bytes | memoryview) -> None:
    """Write `parts`, or drop them if the connection is lost: whoever reads or drains next hears of it.

    asyncio's own event loops do the same, but uvloop raises RuntimeError for a write to a connection that is closed.
    """
    if not writer.transport.is_closing():
        writer.writelines(parts)
