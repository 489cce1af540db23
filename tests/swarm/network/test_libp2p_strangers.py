"""The answers that strangers get from a node's libp2p daemon, and what they can make it store, with real daemons."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from support.network_worlds import eventually, libp2p_node
from swarm.network.interface import NotServed, Stream
from swarm.network.libp2p.daemon_control import ControlError, write_message
from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES
from swarm.network.libp2p.greeting import method_prefix
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.libp2p.stream_resume import ID_BYTES
from swarm.network.libp2p.unary_connection import UnaryConnection
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.multiaddr import peer_id_bytes
from swarm.network.peer_budgets import MAX_UNARY_BYTES
from swarm_protocol import limits
from swarm_protocol.dht_messages import FindRequest, dht_id_of
from swarm_protocol.envelope import seal_record
from swarm_protocol.identity import Identity
from swarm_protocol.proto import p2pd_pb2
from swarm_protocol.wire import encode_varint

KAD = ("/ipfs/kad/1.0.0", "/ipfs/lan/kad/1.0.0")
WARM_UP_S, FLOOD_S = 2.0, 1.5  # the daemon's heap reaches its size for this many refusals within a second
ADD_PROVIDER = 2
MEBIBYTE = 2**20


@asynccontextmanager
async def stranger_beside(node: Libp2pNetwork, identity_path: Path | None = None) -> AsyncIterator[Host]:
    """Start a libp2p host that is connected to `node`, anonymous or with its own key."""
    host = await Host.start(DaemonOptions(identity_path=identity_path, listen=("/ip4/127.0.0.1/tcp/0",)))
    running = asyncio.create_task(host.unary.run())
    try:
        (addr,) = await node.addrs()
        await host.control.connect(node.peer_id, [addr.partition("/p2p/")[0]])
        yield host
    finally:
        await host.stop()
        await running


def write_rsa_key(path: Path) -> None:
    """Write a key of a type that no node has, as libp2p's daemon reads it: the protobuf PrivateKey{RSA, PKCS #1}."""
    key = rsa.generate_private_key(65537, 2048)
    data = key.private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    path.write_bytes(b"\x08\x00\x12" + encode_varint(len(data)) + data)


def test_stranger_with_a_key_type_that_no_node_has_gets_no_answer(tmp_path: Path) -> None:
    write_rsa_key(tmp_path / "rsa")
    served: list[str] = []

    async def unary(peer_id: str, _request: bytes) -> bytes:
        served.append(peer_id)
        return b""

    async def streaming(peer_id: str, _stream: Stream) -> None:
        served.append(peer_id)

    async def main() -> None:
        async with (
            await libp2p_node(tmp_path / "seed") as seed,
            stranger_beside(seed, tmp_path / "rsa") as stranger,
        ):
            await seed.serve("unary", unary)
            await seed.serve_stream("streaming", streaming)
            prefix = method_prefix(seed.network_id)
            with pytest.raises(NotServed):
                await stranger.call(seed.peer_id, f"{prefix}call/unary", b"", timeout_s=30)
            reader, writer = await stranger.open_stream(seed.peer_id, f"{prefix}stream/streaming")
            writer.write(bytes(ID_BYTES))
            async with asyncio.timeout(30):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.transport.abort()
            assert served == []

    asyncio.run(main())


def add_provider(provider: bytes) -> bytes:
    """Return a message of go-libp2p's DHT that makes the receiver keep a record of about 200 bytes in memory."""
    key = b"\x12\x20" + os.urandom(32)
    addr = b"\x04\x7f\x00\x00\x01\x06\x0f\xa1"
    peer = b"\x0a" + bytes([len(provider)]) + provider + b"\x12" + bytes([len(addr)]) + addr
    body = b"\x08" + bytes([ADD_PROVIDER]) + b"\x12" + bytes([len(key)]) + key + b"\x4a" + bytes([len(peer)]) + peer
    return encode_varint(len(body)) + body


def test_stranger_who_speaks_libp2ps_own_dht_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with await libp2p_node(tmp_path / "seed", relay="serve") as seed, stranger_beside(seed) as stranger:
            for protocol in KAD:
                with pytest.raises(ControlError, match="protocols not supported"):
                    await stranger.control.open_stream(seed.peer_id, protocol)

    asyncio.run(main())


def test_flood_of_provider_records_leaves_the_daemon_as_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        async with await libp2p_node(tmp_path / "seed", relay="serve") as seed, stranger_beside(seed) as stranger:
            daemon = psutil.Process(seed.daemon_pid)
            num_taken = await flood(stranger, seed.peer_id, WARM_UP_S)
            before = daemon.memory_info().rss
            num_taken += await flood(stranger, seed.peer_id, FLOOD_S)
            assert num_taken == 0
            # with the DHT, the growth is 80 MiB a second
            assert daemon.memory_info().rss - before < 24 * MEBIBYTE

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("protocol", ["dht/find", "call/large"])
def test_answers_that_a_stranger_does_not_read_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """The daemon keeps each answer until it is read."""
    num_asked = 32
    answers: list[int] = []
    send = UnaryConnection._send

    def counted(connection: UnaryConnection, message: Any) -> None:
        if message.HasField("unaryResponse"):
            answers.append(message.ByteSize())
        send(connection, message)

    async def large(_peer_id: str, _request: bytes) -> bytes:
        return bytes(MEBIBYTE)

    async def all_answered() -> bool:
        return len(answers) == num_asked

    async def main() -> None:
        async with await libp2p_node(tmp_path / "seed") as seed, stranger_beside(seed) as stranger:
            await seed.serve("large", large)
            place(seed, "key", num_records=limits.MAX_RECORDS_PER_KEY)
            request = FindRequest(keys=(dht_id_of("key"),)).to_bytes()
            with monkeypatch.context() as patch:
                patch.setattr(UnaryConnection, "_send", counted)
                asked = [await asked_unread(stranger, seed, protocol, request) for _ in range(num_asked)]
                await eventually(all_answered)
            assert sum(answers) <= num_asked * (MAX_UNARY_BYTES + 64)
            for writer in asked:
                writer.transport.abort()

    asyncio.run(main())


def test_requests_that_a_stranger_does_not_end_are_small(tmp_path: Path) -> None:
    """The daemon waits for the rest of a request without a deadline, and keeps what has come."""
    num_requests, num_bytes = 32, 4 * MEBIBYTE - 1

    async def begin(stranger: Host, node: Libp2pNetwork) -> None:
        """Announce a request of `num_bytes`, and send all but its last byte, if the daemon takes so much."""
        _, writer = await stranger.open_stream(node.peer_id, method_prefix(node.network_id) + "dht/find")
        writer.write(encode_varint(num_bytes) + bytes(num_bytes - 1))
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    async def main() -> None:
        async with await libp2p_node(tmp_path / "seed") as seed, stranger_beside(seed) as stranger:
            daemon = psutil.Process(seed.daemon_pid)
            before = daemon.memory_info().rss
            for _ in range(num_requests):
                await begin(stranger, seed)
            await asyncio.sleep(1.0)
            assert daemon.memory_info().rss - before < num_requests * num_bytes / 4

    asyncio.run(main())


def place(node: Libp2pNetwork, key: str, *, num_records: int) -> None:
    """Let a node store the largest possible records under one key."""
    payload = bytes(limits.MAX_RECORD_BYTES)
    for _ in range(num_records):
        envelope = seal_record(
            Identity.generate(), network_id="test", key=key, payload=payload, issued_at=time.time(), lifetime_s=60
        )
        assert node._dht._storage.store(envelope, envelope.to_bytes())


async def asked_unread(stranger: Host, node: Libp2pNetwork, protocol: str, request: bytes) -> asyncio.StreamWriter:
    """Call a node over a stream whose answer stays unread."""
    name = method_prefix(node.network_id) + protocol
    reader, writer = await stranger.open_stream(node.peer_id, name)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    call = p2pd_pb2.CallUnaryRequest(peer=peer_id_bytes(node.peer_id), proto=name, data=request)
    write_message(writer, p2pd_pb2.PersistentConnectionRequest(callId=os.urandom(16), callUnary=call))
    return writer


async def flood(stranger: Host, peer_id: str, seconds: float) -> int:
    """Send records over eight streams, and return how many could be sent."""
    records = b"".join(add_provider(peer_id_bytes(stranger.peer_id)) for _ in range(100))
    until = time.monotonic() + seconds

    async def send() -> int:
        num_sent = 0
        while time.monotonic() < until:
            with contextlib.suppress(*CONTROL_FAILURES):
                _, writer = await stranger.control.open_stream(peer_id, KAD[0])
                while time.monotonic() < until:
                    writer.write(records)
                    await writer.drain()
                    num_sent += 100
        return num_sent

    return sum(await asyncio.gather(*(send() for _ in range(8))))
