"""Puts a home's line before a real node: a TCP proxy with its rates, latency, jitter and loss, which can stall or cut.

The node listens on a private port and announces the proxy's address, so all that dial it come through the emulated
line; libp2p over TCP works unchanged. What the node dials itself goes through the proxies of those it dials. All
connections share the line's rate each way, as at home. Loss is what TCP makes of it: delay.

In a test: `async with WanProxy(target=("127.0.0.1", port), connection=LINKS["cable"]) as proxy`, then `proxy.address`.
As a process, run in `tests/`: `python -m support.wan_proxy --link cable --target 127.0.0.1:4001`. It answers each JSON
line on stdin with one on stdout, and ends with its stdin:

    {"command": "stall"} or "cut", "restore", "counts"
    {"command": "link", "name": "dsl"}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import random
import socket
import struct
import sys
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from swarm.network.memory.memory_link import LinkModel, Pipe
from swarm.network.rate import Rate

logger = logging.getLogger(__name__)


MBIT_BYTES = 1_000_000 / 8

BURST_S = 0.02
"""Real timers come up to a few ms late; what they lose is made up for."""
CHUNK_S = 0.01
"""A chunk is what the line carries in this time, so that connections share it finely."""
BUFFER_S = 0.1
"""Seconds of traffic that a home router queues before it makes the sender wait."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER of zero: closing sends a TCP reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """`latency_s` is one way, from the node to the core of the internet; `loss` is per packet."""

    name: str
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float
    jitter_s: float
    loss: float = 0.0

    def __post_init__(self) -> None:
        # a LinkModel checks the same bounds
        link_between(self, self)


def link_between(sender: Connection, receiver: Connection) -> LinkModel:
    """The simulated link in that direction: both latencies, the narrower rate."""
    return LinkModel(
        latency_s=sender.latency_s + receiver.latency_s,
        jitter_s=sender.jitter_s + receiver.jitter_s,
        bandwidth_bytes_per_s=min(sender.up_bytes_per_s, receiver.down_bytes_per_s),
        loss=1 - (1 - sender.loss) * (1 - receiver.loss),
    )


def _connection(
    name: str, down_mbit: float, up_mbit: float, latency_ms: float, jitter_ms: float, loss: float = 0.0
) -> Connection:
    return Connection(
        name=name,
        down_bytes_per_s=down_mbit * MBIT_BYTES,
        up_bytes_per_s=up_mbit * MBIT_BYTES,
        latency_s=latency_ms / 1000,
        jitter_s=jitter_ms / 1000,
        loss=loss,
    )


LINKS = {
    connection.name: connection
    for connection in (
        _connection("lan", 1000, 1000, 0.2, 0.1),
        _connection("fibre", 500, 500, 5, 1),
        _connection("cable", 200, 20, 25, 3),
        _connection("dsl", 50, 10, 30, 5, 0.0005),
        _connection("mobile", 30, 8, 50, 25, 0.005),
        _connection("awful", 2, 0.5, 150, 100, 0.02),
    )
}


MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1460, 64 * 1024


class WanProxy:
    """One node's line. `up` is what the node sends, `down` what it gets; each counts its bytes."""

    def __init__(self, *, target: tuple[str, int], connection: Connection, port: int = 0, seed: int = 0) -> None:
        self.up = _Direction(connection.up_bytes_per_s)
        self.down = _Direction(connection.down_bytes_per_s)
        self.num_connections = 0
        self._target = target
        self._connection = connection
        self._port = port
        self._rng = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], tuple[Pipe, Pipe]] = {}
        self._is_stalled = False
        self._is_cut = False

    async def __aenter__(self) -> WanProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._open:
            await asyncio.wait(self._open)
        await self._server.wait_closed()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to announce and to dial."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return host, port

    @property
    def num_open(self) -> int:
        return len(self._open)

    def set_connection(self, connection: Connection) -> None:
        """Change the line, also for connections that are open."""
        self._connection = connection
        self.up.rate.bytes_per_s = connection.up_bytes_per_s
        self.down.rate.bytes_per_s = connection.down_bytes_per_s
        for pipe in self._pipes():
            pipe.set_link(self._link())

    def stall(self) -> None:
        """Bytes stop both ways. Connections stay, and new ones are accepted."""
        self._is_stalled = True
        for pipe in self._pipes():
            pipe.hold()

    def cut(self) -> None:
        """Reset all connections, and new ones at once, until `restore`."""
        self._is_cut = True
        for task in self._open:
            task.cancel()

    def restore(self) -> None:
        """End a stall or a cut. Stalled bytes go on their way."""
        self._is_cut = self._is_stalled = False
        for pipe in self._pipes():
            pipe.release()

    def _pipes(self) -> list[Pipe]:
        return [pipe for pipes in self._open.values() for pipe in pipes]

    def _link(self) -> LinkModel:
        """Return the link without its rates, which all connections share."""
        line = self._connection
        return LinkModel(latency_s=line.latency_s, jitter_s=line.jitter_s, loss=line.loss)

    def _pipe(self, direction: _Direction) -> Pipe:
        pipe = Pipe(self._link(), up=direction.rate, down=Rate(math.inf), rng=lambda: self._rng)
        if self._is_stalled:
            pipe.hold()
        return pipe

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self._is_cut:
            _reset(writer)
            return
        up, down = self._pipe(self.up), self._pipe(self.down)
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer, up, down), name="wan proxy")
        self._open[task] = (up, down)
        task.add_done_callback(self._open.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: Pipe, down: Pipe) -> None:
        """Carry one connection until both sides have ended it. If it breaks in any way, both are reset."""
        writers = [writer]
        try:
            node_reader, node_writer = await asyncio.open_connection(*self._target)
            writers.append(node_writer)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self.down.carry(reader, node_writer, down))
                directions.create_task(self.up.carry(node_reader, writer, up))
            for each in writers:
                each.close()
                await each.wait_closed()
            writers.clear()
        except* OSError as broken:
            logger.debug("a connection broke: %s", broken.exceptions)
        finally:
            up.close()
            down.close()
            for each in writers:
                _reset(each)


class _Direction:
    """One way of the line, which all connections share."""

    def __init__(self, bytes_per_s: float) -> None:
        self.rate = Rate(bytes_per_s, burst_s=BURST_S)
        self.num_bytes = 0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pipe: Pipe) -> None:
        """Copy until `reader` ends and everything has been written; then end `writer`, too."""
        flight = _Flight(writer)
        while data := await reader.read(self._within(CHUNK_S, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)):
            flight.num_bytes += len(data)
            pipe.put(flight, len(data), partial(self._land, flight, data))
            delay_s = pipe.link.latency_s + pipe.link.jitter_s + BUFFER_S
            await flight.lands(self._within(delay_s, MAX_CHUNK_BYTES, math.inf))
        flight.num_bytes += 1  # the end takes its place in the queue
        pipe.put(flight, 0, flight.land_end)
        await flight.lands(1)

    def _land(self, flight: _Flight, data: bytes) -> None:
        self.num_bytes += len(data)
        flight.land(data)

    def _within(self, seconds: float, low: int, high: float) -> int:
        """The bytes that pass in that time, within bounds."""
        return int(min(max(self.rate.bytes_per_s * seconds, low), high))


class _Flight:
    """Bytes of one connection that are under way in one direction."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.num_bytes = 0
        self._writer = writer
        self._landed = asyncio.Event()

    def land(self, data: bytes) -> None:
        self.num_bytes -= len(data)
        if not self._writer.is_closing():
            self._writer.write(data)
        self._landed.set()

    def land_end(self) -> None:
        self.num_bytes -= 1
        if not self._writer.is_closing():
            self._writer.write_eof()
        self._landed.set()

    async def lands(self, limit_bytes: int) -> None:
        """Wait until less than that is in flight, and until the receiver has taken enough. Raises OSError."""
        while self.num_bytes >= limit_bytes:
            self._landed.clear()
            await self._landed.wait()
        await self._writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()


def obey(proxy: WanProxy, line: str) -> dict[str, object]:
    """Carry out one command line of the process's stdin, and say what to answer."""
    try:
        command = json.loads(line)
        match command["command"]:
            case "stall":
                proxy.stall()
            case "cut":
                proxy.cut()
            case "restore":
                proxy.restore()
            case "link":
                proxy.set_connection(LINKS[command["name"]])
            case "counts":
                pass  # every answer has them
            case unknown:
                return {"event": "error", "message": f"unknown command {unknown!r}"}
    except (ValueError, TypeError, KeyError) as error:
        return {"event": "error", "message": f"not a command: {error!r}"}
    return {
        "event": "done",
        "num_connections": proxy.num_connections,
        "num_open": proxy.num_open,
        "bytes_up": proxy.up.num_bytes,
        "bytes_down": proxy.down.num_bytes,
    }


async def _run(arguments: argparse.Namespace) -> None:
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    stdin, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    connection = LINKS[arguments.link]
    async with WanProxy(target=arguments.target, connection=connection, port=arguments.port) as proxy:
        host, port = proxy.address
        _say({"event": "listening", "host": host, "port": port})
        async for line in commands:
            _say(obey(proxy, line.decode(errors="replace")))
    stdin.close()


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m support.wan_proxy", description="An emulated home line before a TCP port."
    )
    parser.add_argument("--link", choices=tuple(LINKS), required=True)
    parser.add_argument("--target", type=_host_and_port, required=True, help="HOST:PORT of the node")
    parser.add_argument("--port", type=int, default=0, help="to listen on at 127.0.0.1; 0: any free one")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
