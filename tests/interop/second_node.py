"""Calls, streams, envelopes and the DHT of Swarm, written from docs/reference/protocol and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import Message
from interop.libp2p_channel import public_key_of, varint
from interop.libp2p_host import Connection, Host, Stream
from swarm_protocol.proto import dht_pb2, failure_pb2, hello_pb2, p2pd_pb2

VERSION = b"\1"
PIECE = 2**20
CREDIT = 4 * 2**20
MAX_DIRECT_BYTES = 64 * 1024
MORE, DATA, GRANT, FINISH, FAILURE, END, ACK = range(7)
SKEW_S = 15.0


def pack(message: Message) -> bytes:
    return VERSION + message.SerializeToString()


def unpack(kind: type[Message], data: bytes) -> Message:
    if data[:1] != VERSION:
        raise ValueError(f"The message has version {data[:1]!r}.")
    return kind.FromString(data[1:])


class Refused(Exception):
    """The peer answered with a Failure."""


def refusal(data: bytes) -> Refused:
    failure = unpack(failure_pb2.Failure, data)
    return Refused(f"{failure.code}: {failure.message}")


# --- envelopes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Envelope:
    data: bytes
    purpose: str
    network: str
    subject: str
    signer: bytes
    issued_at: float
    expires_at: float
    payload: bytes


def read_envelope(data: bytes, purpose: str, network: str, max_lifetime_s: float, now: float | None = None) -> Envelope:
    """Check what identity.md lists, but for the subject."""
    now = time.time() if now is None else now
    if data[:1] != VERSION:
        raise ValueError("version")
    at, texts = 1, []
    for _ in range(3):
        size = int.from_bytes(data[at : at + 4])
        texts.append(data[at + 4 : at + 4 + size].decode())
        at += 4 + size
    signer, (issued, expires, size) = data[at : at + 32], struct.unpack(">ddI", data[at + 32 : at + 52])
    payload, signature = data[at + 52 : at + 52 + size], data[at + 52 + size :]
    if len(payload) != size or len(signature) != 64:
        raise ValueError("form")
    if texts[:2] != [purpose, network]:
        raise ValueError("purpose or network")
    if not 0 < issued < expires or expires <= now or issued > now + SKEW_S or expires - issued > max_lifetime_s:
        raise ValueError("times")
    Ed25519PublicKey.from_public_bytes(signer).verify(signature, b"swarm-envelope:" + data[:-64])
    return Envelope(data, *texts, signer, issued, expires, payload)


def make_envelope(host: Host, purpose: str, network: str, subject: str, payload: bytes, lifetime_s: float) -> bytes:
    head = VERSION
    for text in (purpose, network, subject):
        head += struct.pack(">I", len(text.encode())) + text.encode()
    now = time.time()
    head += host.key.public_key().public_bytes_raw() + struct.pack(">dd", now, now + lifetime_s)
    head += struct.pack(">I", len(payload)) + payload
    return head + host.key.sign(b"swarm-envelope:" + head)


# --- streams of messages ---------------------------------------------------------------------------------------------


class MessageStream:
    """A stream without resuming: it is lost with its connection."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self._room, self._room_came = CREDIT, asyncio.Condition()
        self._heard = self._told = 0
        self._messages: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._sending, self._parts = asyncio.Lock(), b""
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._acknowledge())]

    @classmethod
    async def open(cls, connection: Connection, protocol: str) -> MessageStream:
        stream = await connection.open(protocol)
        await stream.write(os.urandom(16))
        return cls(stream)

    @classmethod
    async def accept(cls, stream: Stream) -> MessageStream:
        """Take a stream that the peer has opened. Its id would only serve for resuming."""
        await stream.read(16)
        return cls(stream)

    async def _frame(self, kind: int, length: int, body: bytes = b"") -> None:
        heard = self._heard - self._told
        self._told = self._heard
        ack = struct.pack(">BI", ACK, heard) if heard else b""
        await self._stream.write(ack + struct.pack(">BI", kind, length) + body)

    async def send(self, message: bytes) -> None:
        async with self._sending:
            for at in range(0, len(message) or 1, PIECE):
                piece = message[at : at + PIECE]
                async with self._room_came:
                    await self._room_came.wait_for(lambda: self._room >= PIECE + 256)
                    self._room -= len(piece) + 256
                await self._frame(MORE if at + PIECE < len(message) else DATA, len(piece), piece)

    async def receive(self) -> bytes:
        """Return the next message. Raises EOFError after the last one, and Refused for a failure."""
        message = await self._messages.get()
        if isinstance(message, Exception):
            self._messages.put_nowait(message)
            raise message
        return message

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await self._frame(END, 0)
        except EOFError:
            return
        self._stream.close()

    async def _receive(self) -> None:
        try:
            while True:
                await self._take(*struct.unpack(">BI", await self._stream.read(5)))
        except (EOFError, Refused) as error:
            self._messages.put_nowait(error)

    async def _take(self, kind: int, length: int) -> None:
        body = await self._stream.read(length) if kind in (MORE, DATA, FAILURE) else b""
        self._heard += kind != ACK
        if kind == FAILURE:
            raise refusal(body)
        if kind in (FINISH, END):
            raise EOFError("The peer has nothing more to say.")
        if kind == GRANT:
            async with self._room_came:
                self._room += length
                self._room_came.notify_all()
        elif kind in (MORE, DATA):
            self._parts += body
            await self._frame(GRANT, length + 256)
        if kind == DATA:
            self._messages.put_nowait(self._parts)
            self._parts = b""

    async def _acknowledge(self) -> None:
        while True:
            await asyncio.sleep(1)
            if count := self._heard - self._told:
                self._told = self._heard
                await self._stream.write(struct.pack(">BI", ACK, count))


# --- a node ----------------------------------------------------------------------------------------------------------


Unary = Callable[[str, bytes], bytes]
"""Answers a call, given the caller's peer id and the request."""


class Node:
    def __init__(self, network: str):
        self.network, self.host = network, Host()
        self.connections: dict[str, Connection] = {}
        self.addrs: dict[str, list[str]] = {}
        self.records: dict[bytes, dict[bytes, Envelope]] = {}  # those held for others, by place and signer
        self.parcels: dict[tuple[str, bytes], bytes] = {}
        self._answer("/swarm/hello", lambda _peer_id, _request: self._hello())

    def protocol(self, rest: str) -> str:
        return f"/swarm/7/{self.network}/{rest}"

    async def join(self, addr: str) -> hello_pb2.Hello:
        peer_id = addr.rsplit("/", 1)[1]
        self.connections[peer_id] = await self.host.dial(addr)
        theirs = unpack(hello_pb2.Hello, await self.unary(peer_id, "/swarm/hello", self._hello()))
        if theirs.network_id != self.network or theirs.protocol_version != 7:
            raise ConnectionError(f"The peer is of another network or version: {theirs}")
        if abs(theirs.sent_at - time.time()) > SKEW_S:
            raise ConnectionError("The clocks differ.")
        return theirs

    def _hello(self) -> bytes:
        return pack(
            hello_pb2.Hello(network_id=self.network, protocol_version=7, software_version="2", sent_at=time.time())
        )

    async def listen(self) -> None:
        """Take part in the DHT. Without this a node only asks."""
        await self.host.listen()
        self._answer(self.protocol("dht/find"), self._found)
        self._answer(self.protocol("dht/store"), self._store)

    def serve(self, method: str, handler: Unary) -> None:
        """Answer calls of a method; a large answer is kept until its caller fetches it."""

        def answer(peer_id: str, request: bytes) -> bytes:
            response = handler(peer_id, request)
            if len(response) < MAX_DIRECT_BYTES:
                return b"\0" + response
            token = os.urandom(16)
            self.parcels[peer_id, token] = response
            return b"\2" + token

        self._answer(self.protocol(f"call/{method}"), answer)
        self.host.handlers[self.protocol("parcel/")] = self._send_parcel

    async def _send_parcel(self, stream: Stream, peer_id: str) -> None:
        messages = await MessageStream.accept(stream)
        await messages.send(self.parcels.pop((peer_id, await messages.receive())))
        with suppress(EOFError):
            await messages.receive()  # the caller ends the stream when it has the parcel
        await messages.close()

    def _answer(self, protocol: str, handler: Unary) -> None:
        async def answer(stream: Stream, peer_id: str) -> None:
            request = p2pd_pb2.PersistentConnectionRequest.FromString(await stream.read_delimited())
            response = p2pd_pb2.PersistentConnectionRequest(callId=request.callId)
            response.unaryResponse.response = handler(peer_id, request.callUnary.data)
            await write_delimited(stream, response)

        self.host.handlers[protocol] = answer

    async def connect(self, peer_id: str) -> Connection:
        known = self.connections.get(peer_id)
        if known is None or known.closed:
            for addr in self.addrs[peer_id]:
                try:
                    known = self.connections[peer_id] = await self.host.dial(f"{addr}/p2p/{peer_id}")
                    break
                except OSError:
                    continue
            else:
                raise ConnectionError(f"Nothing answers at {self.addrs[peer_id]}.")
        return known

    async def unary(self, peer_id: str, protocol: str, data: bytes) -> bytes:
        stream = await (await self.connect(peer_id)).open(protocol)
        request = p2pd_pb2.PersistentConnectionRequest(callId=os.urandom(16))
        request.callUnary.peer = b"\x00\x24\x08\x01\x12\x20" + public_key_of(peer_id)
        request.callUnary.proto = protocol
        request.callUnary.data = data
        await write_delimited(stream, request)
        answer = p2pd_pb2.PersistentConnectionRequest.FromString(await stream.read_delimited())
        stream.close()
        if answer.unaryResponse.WhichOneof("result") != "response":
            raise Refused(answer.unaryResponse.error.decode())
        return answer.unaryResponse.response

    async def call(self, peer_id: str, method: str, request: bytes) -> bytes:
        answer = await self.unary(peer_id, self.protocol(f"call/{method}"), request)
        if answer[0] == 1:
            raise refusal(answer[1:])
        if answer[0] == 2:
            parcel = await self.stream(peer_id, "parcel/")
            await parcel.send(answer[1:])
            answer = b"\0" + await parcel.receive()
            await parcel.close()
        return answer[1:]

    async def stream(self, peer_id: str, rest: str) -> MessageStream:
        return await MessageStream.open(await self.connect(peer_id), self.protocol(rest))

    # --- the DHT ---

    async def find(self, key: str) -> dict[bytes, Envelope]:
        """Return the newest valid record of each signer under `key`, from all nodes nearby."""
        place = hashlib.sha256(f"{key}#".encode()).digest()
        asked: set[str] = set()
        records: dict[bytes, Envelope] = {}
        while waiting := self._nearest(place, asked):
            answers = await asyncio.gather(*[self._ask(peer_id, place) for peer_id in waiting])
            asked |= set(waiting)
            for data in [data for answer in answers for data in answer]:
                envelope = read_envelope(data, "record", self.network, 300.0)
                if envelope.subject.split("#")[0] != key:
                    raise ValueError("The record has another subject.")
                former = records.get(envelope.signer)
                if former is None or former.issued_at < envelope.issued_at:
                    records[envelope.signer] = envelope
        return records

    def _nearest(self, place: bytes, asked: set[str]) -> list[str]:
        def distance(peer_id: str) -> int:
            return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()) ^ int.from_bytes(place)

        known = sorted(set(self.connections) | set(self.addrs) - {self.host.peer_id}, key=distance)[:10]
        return [peer_id for peer_id in known if peer_id not in asked]

    async def store(self, peer_id: str, record: bytes) -> bool:
        """Ask a node to hold a signed record, and return whether it does."""
        request = pack(dht_pb2.StoreRequest(record=record))
        answer = await self.unary(peer_id, self.protocol("dht/store"), request)
        return bool(answer) and unpack(dht_pb2.StoreResponse, answer).held

    async def publish(self, key: str, payload: Message, lifetime_s: float = 300.0) -> bool:
        """Sign a record without digits, store it at the nodes nearest to its key, and return whether one holds it."""
        await self.find(key)
        record = make_envelope(self.host, "record", self.network, f"{key}#", pack(payload), lifetime_s)
        nearest = self._nearest(hashlib.sha256(f"{key}#".encode()).digest(), set())[:5]
        return any(await asyncio.gather(*[self.store(peer_id, record) for peer_id in nearest]))

    def _found(self, peer_id: str, request: bytes) -> bytes:
        asked = unpack(dht_pb2.FindRequest, request)
        if asked.addrs:
            self.addrs[peer_id] = list(asked.addrs)
        answer = dht_pb2.FindResponse(addrs=self.host.addrs)
        for place in asked.keys:
            held = [] if asked.only_peers else [each.data for each in self.records.get(place, {}).values()]
            near = [other for other in self._nearest(place, set()) if other in self.addrs]
            peers = [dht_pb2.Contact(peer_id=other, addrs=self.addrs[other]) for other in near]
            answer.found.add(records=held, peers=peers)
        return pack(answer)

    def _store(self, _peer_id: str, request: bytes) -> bytes:
        envelope = read_envelope(unpack(dht_pb2.StoreRequest, request).record, "record", self.network, 300.0)
        held = self.records.setdefault(hashlib.sha256(envelope.subject.encode()).digest(), {})
        if envelope.signer not in held or held[envelope.signer].issued_at < envelope.issued_at:
            held[envelope.signer] = envelope
        return pack(dht_pb2.StoreResponse(held=True))

    async def _ask(self, peer_id: str, place: bytes) -> list[bytes]:
        try:
            async with asyncio.timeout(3):
                request = pack(dht_pb2.FindRequest(keys=[place], addrs=self.host.addrs))
                answer = unpack(dht_pb2.FindResponse, await self.unary(peer_id, self.protocol("dht/find"), request))
                if answer.is_cut:
                    whole = await self.stream(peer_id, "dht/find_whole")
                    await whole.send(request)
                    answer = unpack(dht_pb2.FindResponse, await whole.receive())
        except (OSError, EOFError, TimeoutError):
            return []
        for contact in answer.found[0].peers:
            self.addrs.setdefault(contact.peer_id, list(contact.addrs))
        self.addrs[peer_id] = list(answer.addrs) or self.addrs.get(peer_id, [])
        return list(answer.found[0].records)

    async def __aenter__(self) -> Node:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.host.close()
        for connection in self.connections.values():
            await connection.close()


async def write_delimited(stream: Stream, message: Message) -> None:
    data = message.SerializeToString()
    await stream.write(varint(len(data)) + data)
