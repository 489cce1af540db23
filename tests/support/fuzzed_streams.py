"""A stream whose other side sends frames in any order and number, of any length, whole or broken."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from contextlib import suppress

from support.fuzzing import Target
from swarm.network import framing
from swarm.network.framing import Kind
from swarm.network.interface import EndOfStream
from swarm.network.libp2p.kept_frames import SentFrames
from swarm.network.libp2p.libp2p_stream import Libp2pStream, Resumed
from swarm.network.peer_budgets import UnreadBudget
from swarm_protocol.errors import PeerRefused, PeerUnreachable, SwarmError
from swarm_protocol.failure_messages import encode_failure

NUM_EVENTS = 40
MAX_UNREAD_BYTES = 2**18
_LENGTHS = (0, 1, 2, 300, 2**14 - 5, 2**14, 2**16, 2**16 + 1, 2**20 - 1, 2**20, 2**20 + 1, 2**22, 2**32 - 1)


def play_stream(data: bytes) -> Counter[str]:
    """Play a history that follows from `data`, and return how often each thing happened in it."""
    return asyncio.run(_play(random.Random(data)))


async def _play(chance: random.Random) -> Counter[str]:
    happened, unread, kept = Counter[str](), UnreadBudget(max_peer_bytes=MAX_UNREAD_BYTES), UnreadBudget()
    near, far = socket.socketpair()
    far.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=near)
    sent = SentFrames("other", kept)
    stream = Libp2pStream(
        reader,
        writer,
        timeout_s=None,
        sent=sent,
        reconnect=_nowhere,
        unread=unread,
        max_message_bytes=2**17,
    )
    pump = asyncio.create_task(stream.pump())
    for _ in range(NUM_EVENTS):
        with suppress(BlockingIOError, ConnectionError):
            far.send(_sent(chance))
        try:
            async with asyncio.timeout(0 if chance.random() < 0.7 else 0.001):
                await _act(stream, chance, happened)
        except (SwarmError, EndOfStream, TimeoutError) as error:
            happened[type(error).__name__] += 1
        assert unread.num_bytes <= MAX_UNREAD_BYTES
    far.close()
    async with asyncio.timeout(30):
        await pump  # it raises nothing
    stream.abort()
    assert unread.num_bytes == kept.num_bytes == 0
    return happened


async def _nowhere(_num_received: int) -> Resumed:
    raise PeerUnreachable("there is no other byte stream")


def _sent(chance: random.Random) -> bytes:
    """Return what the other side sends: a frame or a few, of which most are ones that a side may send."""
    match chance.randrange(12):
        case 0:
            return chance.randbytes(chance.choice((1, 5, 6, 200)))
        case 1:
            return framing.HEADER.pack(chance.randrange(8), chance.choice(_LENGTHS))
        case 2:
            return framing.acknowledgement(chance.choice((0, 0, 1, 2, 2**16)))
        case 3:
            return framing.credit(chance.choice((0, 1, 300, 2**20, framing.WINDOW_BYTES)))
        case 4 if chance.random() < 0.2:
            return framing.frame(chance.choice((Kind.FINISH, Kind.END)))
        case 5 if chance.random() < 0.2:
            return framing.frame(Kind.FAILURE, encode_failure(PeerRefused("no")) + chance.choice((b"", b"x")))
        case 6:
            return framing.frame(Kind.DATA) * chance.choice((2, 300))
        case 7:
            return framing.frame(Kind.MORE, bytes(framing.CHUNK_BYTES))
    return framing.frame(Kind.DATA, bytes(chance.choice(_LENGTHS[:7])))


async def _act(stream: Libp2pStream, chance: random.Random, happened: Counter[str]) -> None:
    match chance.randrange(8):
        case 0 | 1 if not happened["finished"]:
            await stream.send(bytes(chance.choice(_LENGTHS[:6])))
            happened["sent"] += 1
        case 2:
            stream.acknowledge()
        case 3 if chance.random() < 0.1:
            happened["finished"] += 1
            await stream.finish()
        case _:
            await stream.receive()
            happened["received"] += 1


TARGETS = (Target(name="frames of a stream", take=play_stream, every=16),)
