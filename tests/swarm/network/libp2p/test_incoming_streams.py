"""Every incoming connection is closed, however the tasks that got it end."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from swarm.network.libp2p.daemon_control import IncomingStreams


def test_stream_whose_task_is_cancelled_before_it_began_is_closed(tmp_path: Path) -> None:
    async def serve(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        raise AssertionError("it has begun")

    async def main() -> None:
        accepted = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            streams = IncomingStreams(tasks, serve)

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                before = asyncio.all_tasks()
                streams.connected(reader, writer)
                (task,) = asyncio.all_tasks() - before
                task.cancel()
                accepted.set_result(writer)

            server = await asyncio.start_unix_server(accept, tmp_path / "streams.sock")
            reader, writer = await asyncio.open_unix_connection(tmp_path / "streams.sock")
            there = await accepted
            assert await reader.read() == b""
            assert there.transport.is_closing()
            writer.transport.abort()
            server.close()

    asyncio.run(main())


def test_stream_that_arrives_in_the_turn_in_which_the_tasks_are_cancelled_is_closed() -> None:
    async def serve(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        raise AssertionError("it was served")

    async def fail() -> None:
        raise OSError("the daemon has ended")

    async def arrive(streams: IncomingStreams) -> None:
        here, there = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=here)
        try:
            await asyncio.Event().wait()
        finally:
            streams.connected(reader, writer)
            assert writer.transport.is_closing()
            there.close()

    async def run() -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(arrive(IncomingStreams(tasks, serve)))
            await asyncio.sleep(0.1)
            tasks.create_task(fail())

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await run()
        assert [str(error) for error in caught.value.exceptions] == ["the daemon has ended"]

    asyncio.run(main())


def test_stream_that_arrives_while_the_tasks_end_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "streams.sock")

    async def serve(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        raise AssertionError("it was served")

    async def fail() -> None:
        raise OSError("the daemon has ended")

    async def end_slowly(streams: IncomingStreams) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            here, there = socket.socketpair()
            reader, writer = await asyncio.open_unix_connection(sock=here)
            streams.connected(reader, writer)
            assert writer.transport.is_closing()
            there.close()

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            streams = IncomingStreams(tasks, serve)
            await streams.listen(path)
            tasks.create_task(end_slowly(streams))
            await asyncio.sleep(0)
            tasks.create_task(fail())

    async def main() -> None:
        async with asyncio.timeout(60):
            with pytest.raises(ExceptionGroup) as caught:
                await run()
            assert [str(error) for error in caught.value.exceptions] == ["the daemon has ended"]
            with pytest.raises(OSError, match=r"refused|No such file"):
                await asyncio.open_unix_connection(path)

    asyncio.run(main())
