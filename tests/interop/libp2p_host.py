"""A small libp2p host: yamux over TCP and Noise, from libp2p's specifications."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from interop.libp2p_channel import MULTISTREAM, Raw, peer_id_of, varint

DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
ROOM = 256 * 1024


class Stream:
    """One yamux stream. Reading and writing before it ends; `EOFError` once the other side has ended it."""

    def __init__(self, connection: Connection, number: int):
        self.connection, self.number = connection, number
        self.buffer, self.ended, self.send_room = bytearray(), False, ROOM
        self.changed, self._writing = asyncio.Condition(), asyncio.Lock()

    async def read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            async with self.changed:
                await self.changed.wait_for(lambda: self.buffer or self.ended)
                if not self.buffer:
                    raise EOFError("the stream has ended")
                piece = bytes(self.buffer[: size - len(parts)])
                del self.buffer[: len(piece)]
            parts += piece
            if not self.ended:
                self.connection.send(WINDOW, 0, self.number, len(piece))
        return bytes(parts)

    async def read_varint(self) -> int:
        number = shift = 0
        while True:
            byte = (await self.read(1))[0]
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7

    async def read_delimited(self) -> bytes:
        return await self.read(await self.read_varint())

    async def write(self, data: bytes) -> None:
        async with self._writing:
            await self._write(data)

    async def _write(self, data: bytes) -> None:
        while data:
            async with self.changed:
                await self.changed.wait_for(lambda: self.send_room or self.connection.closed)
                if self.connection.closed:
                    raise EOFError("the connection has ended")
                piece, data = data[: min(self.send_room, 32768)], data[min(self.send_room, 32768) :]
                self.send_room -= len(piece)
            self.connection.send(DATA, 0, self.number, len(piece), piece)
        await self.connection.drain()

    def close(self) -> None:
        self.connection.send(DATA, FIN, self.number, 0)

    def reset(self) -> None:
        self.connection.send(DATA, RST, self.number, 0)
        self.connection.streams.pop(self.number, None)

    async def say(self, line: str) -> None:
        await self.write(varint(len(line) + 1) + line.encode() + b"\n")

    async def hear(self) -> str:
        return (await self.read_delimited()).decode().rstrip("\n")


Handler = Callable[[Stream, str], Awaitable[None]]


class Connection:
    def __init__(self, raw: Raw, peer_id: str, handlers: dict[str, Handler], first_stream: int = 1):
        self.raw, self.peer_id, self.handlers = raw, peer_id, handlers
        self.streams: dict[int, Stream] = {}
        self.closed, self._next = False, first_stream
        self._tasks = {asyncio.create_task(self._receive())}

    def send(self, kind: int, flags: int, number: int, length: int, data: bytes = b"") -> None:
        if not self.closed:
            self.raw.send(struct.pack(">BBHII", 0, kind, flags, number, length) + data)

    async def drain(self) -> None:
        await self.raw.writer.drain()

    async def open(self, protocol: str) -> Stream:
        number, self._next = self._next, self._next + 2
        stream = self.streams[number] = Stream(self, number)
        self.send(WINDOW, SYN, number, 0)
        await stream.say(MULTISTREAM)
        await stream.say(protocol)
        if await stream.hear() != MULTISTREAM or await stream.hear() != protocol:
            stream.reset()
            raise ConnectionError(f"{self.peer_id} does not know {protocol}.")
        return stream

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._end()

    async def _end(self) -> None:
        self.closed = True
        self.raw.writer.close()
        for stream in list(self.streams.values()):
            await self._finish(stream)

    async def _finish(self, stream: Stream) -> None:
        async with stream.changed:
            stream.ended = True
            stream.changed.notify_all()

    async def _receive(self) -> None:
        try:
            while True:
                _, kind, flags, number, length = struct.unpack(">BBHII", await self.raw.read(12))
                data = await self.raw.read(length) if kind == DATA else b""
                if kind == PING and flags & SYN:
                    self.send(PING, ACK, 0, length)
                elif kind == GO_AWAY:
                    break
                elif kind in (DATA, WINDOW):
                    await self._take(kind, flags, number, length, data)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        await self._end()

    async def _take(self, kind: int, flags: int, number: int, length: int, data: bytes) -> None:
        if flags & SYN:
            self.streams[number] = Stream(self, number)
            self.send(WINDOW, ACK, number, 0)
            self._tasks.add(asyncio.create_task(self._answer(self.streams[number])))
        stream = self.streams.get(number)
        if stream is None:
            return
        async with stream.changed:
            stream.buffer += data
            stream.send_room += length if kind == WINDOW else 0
            stream.ended |= bool(flags & (FIN | RST))
            stream.changed.notify_all()

    async def _answer(self, stream: Stream) -> None:
        """Negotiate the protocol of a stream that the other side has opened, and run its handler."""
        try:
            await stream.hear()
            await stream.say(MULTISTREAM)
            while (protocol := await stream.hear()) not in self.handlers:
                await stream.say("na")
            await stream.say(protocol)
            await self.handlers[protocol](stream, self.peer_id)
        except EOFError:
            pass
        stream.close()


async def echo(stream: Stream, peer_id: str) -> None:
    """Answer libp2p's ping."""
    while True:
        await stream.write(await stream.read(32))


class Host:
    def __init__(self, key: Ed25519PrivateKey | None = None):
        self.key = key or Ed25519PrivateKey.generate()
        self.peer_id = peer_id_of(self.key.public_key().public_bytes_raw())
        self.handlers: dict[str, Handler] = {"/ipfs/ping/1.0.0": echo}
        self.addrs: list[str] = []
        self._server: asyncio.Server | None = None
        self._accepted: list[Connection] = []

    async def listen(self) -> None:
        """Accept connections at a free port of this machine, which `addrs` then names."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.addrs.append(f"/ip4/127.0.0.1/tcp/{self._server.sockets[0].getsockname()[1]}")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = Raw(reader, writer)
        try:
            await raw.accept("/noise")
            peer_id = await raw.secure_dialled(self.key)
            await raw.accept("/yamux/1.0.0")
        except (asyncio.IncompleteReadError, ConnectionError):  # the dialler has another connection already
            writer.close()
        else:
            self._accepted.append(Connection(raw, peer_id, self.handlers, first_stream=2))

    async def close(self) -> None:
        """Stop to accept connections, and close those that were accepted."""
        if self._server is not None:
            self._server.close()
        for connection in self._accepted:
            await connection.close()

    async def dial(self, addr: str) -> Connection:
        """Connect to `/ip4/HOST/tcp/PORT/p2p/PEER`."""
        _, _, host, _, port, _, peer_id = addr.split("/")
        raw = Raw(*await asyncio.open_connection(host, int(port)))
        await raw.select("/noise")
        if await raw.secure(self.key) != peer_id:
            raise ConnectionError("Another peer answered.")
        await raw.select("/yamux/1.0.0")
        return Connection(raw, peer_id, self.handlers)
