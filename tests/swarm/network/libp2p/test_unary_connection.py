"""What a unary connection leaves behind when it cannot be opened."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from swarm.network.libp2p.daemon_control import Control
from swarm.network.libp2p.unary_connection import UnaryConnection


def test_opening_that_is_cancelled_closes_its_connection(tmp_path: Path) -> None:
    async def main() -> None:
        asked, closed = asyncio.Event(), asyncio.Event()

        async def silent_daemon(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            asked.set()
            await reader.read()
            closed.set()
            writer.close()

        path = str(tmp_path / "socket")
        async with await asyncio.start_unix_server(silent_daemon, path), asyncio.timeout(10):
            opening = asyncio.create_task(UnaryConnection.open(Control(path)))
            await asked.wait()
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            await closed.wait()

    asyncio.run(main())
