"""A small libp2p host that dials: TCP, multistream-select, Noise XX and yamux, from their specifications."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import struct
from collections.abc import Awaitable, Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
KEY_HEAD = bytes.fromhex("08011220")
NOISE = b"Noise_XX_25519_ChaChaPoly_SHA256"
DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
ROOM = 256 * 1024
MULTISTREAM = "/multistream/1.0.0"


def base58(data: bytes) -> str:
    number, text = int.from_bytes(data), ""
    while number:
        number, digit = divmod(number, 58)
        text = ALPHABET[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def peer_id_of(public_key: bytes) -> str:
    return base58(b"\x00\x24" + KEY_HEAD + public_key)


def public_key_of(peer_id: str) -> bytes:
    number = 0
    for letter in peer_id:
        number = number * 58 + ALPHABET.index(letter)
    return number.to_bytes(37)[-32:]


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


class Cipher:
    def __init__(self, key: bytes):
        self._aead, self._count = ChaCha20Poly1305(key), 0

    def _nonce(self) -> bytes:
        self._count += 1
        return bytes(4) + struct.pack("<Q", self._count - 1)

    def encrypt(self, data: bytes, about: bytes = b"") -> bytes:
        return self._aead.encrypt(self._nonce(), data, about)

    def decrypt(self, data: bytes, about: bytes = b"") -> bytes:
        return self._aead.decrypt(self._nonce(), data, about)


class Handshake:
    """The symmetric state of Noise XX."""

    def __init__(self) -> None:
        self.chain, self.digest = NOISE, hashlib.sha256(NOISE).digest()
        self._cipher: Cipher | None = None

    def _derive(self, secret: bytes) -> tuple[bytes, bytes]:
        seed = hmac.digest(self.chain, secret, "sha256")
        first = hmac.digest(seed, b"\1", "sha256")
        return first, hmac.digest(seed, first + b"\2", "sha256")

    def mix(self, data: bytes) -> bytes:
        self.digest = hashlib.sha256(self.digest + data).digest()
        return data

    def mix_key(self, own: X25519PrivateKey, other: bytes) -> None:
        self.chain, key = self._derive(own.exchange(X25519PublicKey.from_public_bytes(other)))
        self._cipher = Cipher(key)

    def encrypt(self, data: bytes) -> bytes:
        return self.mix(self._cipher.encrypt(data, self.digest))

    def decrypt(self, data: bytes) -> bytes:
        plain = self._cipher.decrypt(data, self.digest)
        self.mix(data)
        return plain

    def split(self) -> tuple[Cipher, Cipher]:
        first, second = self._derive(b"")
        return Cipher(first), Cipher(second)


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


class Raw:
    """The TCP connection as multistream-select and then Noise need it, before there are streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.outward: Cipher | None = None
        self.inward: Cipher | None = None
        self.plain = bytearray()

    def write_frame(self, data: bytes) -> None:
        self.writer.write(struct.pack(">H", len(data)) + data)

    async def read_frame(self) -> bytes:
        return await self.reader.readexactly(*struct.unpack(">H", await self.reader.readexactly(2)))

    def send(self, data: bytes) -> None:
        if self.outward is None:
            self.writer.write(data)
            return
        for at in range(0, len(data), 65000):
            self.write_frame(self.outward.encrypt(data[at : at + 65000]))

    async def read(self, size: int) -> bytes:
        if self.inward is None:
            return await self.reader.readexactly(size)
        while len(self.plain) < size:
            self.plain += self.inward.decrypt(await self.read_frame())
        taken = bytes(self.plain[:size])
        del self.plain[:size]
        return taken

    async def select(self, protocol: str) -> None:
        for line in (MULTISTREAM, protocol):
            self.send(varint(len(line) + 1) + line.encode() + b"\n")
        for line in (MULTISTREAM, protocol):
            size = (await self.read(1))[0]
            if (heard := await self.read(size)) != line.encode() + b"\n":
                raise ConnectionError(f"The peer answered {heard!r} to {line}.")

    async def secure(self, key: Ed25519PrivateKey) -> str:
        """Do Noise XX as the dialler, and return the peer id that the other side has proved."""
        noise, own, static = Handshake(), X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self.write_frame(noise.mix(own.public_key().public_bytes_raw()))
        noise.mix(b"")
        answer = await self.read_frame()
        other = noise.mix(answer[:32])
        noise.mix_key(own, other)
        other_static = noise.decrypt(answer[32:80])
        noise.mix_key(own, other_static)
        identity = read_fields(noise.decrypt(answer[80:]))
        public = identity[1][len(KEY_HEAD) :]
        Ed25519PublicKey.from_public_bytes(public).verify(identity[2], b"noise-libp2p-static-key:" + other_static)
        sealed = noise.encrypt(static.public_key().public_bytes_raw())
        noise.mix_key(static, other)
        signed = key.sign(b"noise-libp2p-static-key:" + static.public_key().public_bytes_raw())
        public_key = KEY_HEAD + key.public_key().public_bytes_raw()
        payload = b"\x0a" + varint(len(public_key)) + public_key + b"\x12" + varint(len(signed)) + signed
        self.write_frame(sealed + noise.encrypt(payload))
        self.outward, self.inward = noise.split()
        return peer_id_of(public)


def read_fields(message: bytes) -> dict[int, bytes]:
    """Read a protobuf message whose fields are all byte strings with lengths below 16,384."""
    fields, at = {}, 0
    while at < len(message):
        number, size, at = message[at] >> 3, message[at + 1], at + 2
        if size > 127:
            size, at = size & 127 | message[at] << 7, at + 1
        fields[number], at = message[at : at + size], at + size
    return fields


class Connection:
    def __init__(self, raw: Raw, peer_id: str, handlers: dict[str, Handler]):
        self.raw, self.peer_id, self.handlers = raw, peer_id, handlers
        self.streams: dict[int, Stream] = {}
        self.closed, self._next = False, 1
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

    async def dial(self, addr: str) -> Connection:
        """Connect to `/ip4/HOST/tcp/PORT/p2p/PEER`."""
        _, _, host, _, port, _, peer_id = addr.split("/")
        raw = Raw(*await asyncio.open_connection(host, int(port)))
        await raw.select("/noise")
        if await raw.secure(self.key) != peer_id:
            raise ConnectionError("Another peer answered.")
        await raw.select("/yamux/1.0.0")
        return Connection(raw, peer_id, self.handlers)
