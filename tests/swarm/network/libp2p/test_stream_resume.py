"""Streams between real daemons whose connection is cut or replaced, peers that are killed, and peers that cheat."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support.network_worlds import eventually, libp2p_node
from support.proxied_pair import Pair, PairRun, echo_stream, pair_runner
from swarm.network import framing
from swarm.network.interface import EndOfStream, Stream
from swarm.network.libp2p import reconnection, stream_resume
from swarm.network.libp2p.libp2p_stream import Libp2pStream
from swarm.network.libp2p.stream_resume import ANSWER, ID_BYTES, REQUEST
from swarm.network.libp2p_network import Libp2pNetwork
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.identity import Identity

MIB = 2**20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairRun]:
    with pair_runner(tmp_path_factory.mktemp("pair")) as run:
        yield run


@pytest.mark.parametrize("opener", ["a", "b"])
@pytest.mark.parametrize(("num_messages", "num_bytes"), [(3000, 300), (40, 700_000), (6, 9 * MIB)])
def test_stream_loses_no_message_when_its_connection_is_cut(
    run: PairRun, opener: str, num_messages: int, num_bytes: int
) -> None:
    messages = [random.Random(index).randbytes(num_bytes) for index in range(num_messages)]

    async def send(stream: Stream) -> None:
        for message in messages:
            await stream.send(message)
        await stream.finish()

    async def case(pair: Pair) -> None:
        caller, server = (pair.a, pair.b) if opener == "a" else (pair.b, pair.a)
        async with caller.stream(server.peer_id, "echo", timeout_s=30) as stream:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(send(stream))
                for index, message in enumerate(messages):
                    assert await stream.receive() == message
                    if index in (num_messages // 6, num_messages // 2):
                        assert num_bytes < 1000 or not sending.done()
                        await pair.cut()
            with pytest.raises(EndOfStream):
                await stream.receive()

    run(case)


def test_idle_stream_keeps_no_frames_to_send_again(run: PairRun) -> None:
    async def case(pair: Pair) -> None:
        async with pair.b.stream(pair.a.peer_id, "echo", timeout_s=30) as stream:
            for num_bytes in (10, 100_000, 5 * MIB):
                await stream.send(bytes(num_bytes))
                assert await stream.receive() == bytes(num_bytes)

            async def is_acknowledged() -> bool:
                return pair.a._host.unacknowledged.num_bytes == pair.b._host.unacknowledged.num_bytes == 0

            assert pair.a._host.unacknowledged.num_bytes > 0
            await eventually(is_acknowledged)

    run(case)


def test_stream_keeps_only_frames_that_answers_do_not_acknowledge(run: PairRun) -> None:
    async def case(pair: Pair) -> None:
        message = bytes(100_000)
        async with pair.b.stream(pair.a.peer_id, "echo", timeout_s=30) as stream:
            for _ in range(9):
                await stream.send(message)
                assert await stream.receive() == message
                assert pair.b._host.unacknowledged.num_bytes == 0
                assert pair.a._host.unacknowledged.num_bytes < 2 * framing.cost(len(message))

    run(case)


def test_stream_ends_with_its_connection_when_it_has_no_room_to_keep_frames(
    run: PairRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(pair: Pair) -> None:
        monkeypatch.setattr(pair.b._host.unacknowledged, "_max_peer_bytes", 1000)
        monkeypatch.setattr(stream_resume, "HOLD_S", 60.0)
        async with pair.b.stream(pair.a.peer_id, "echo", timeout_s=30) as stream:
            for _ in range(3):  # each is acknowledged with the echo
                await stream.send(bytes(100_000))
                assert await stream.receive() == bytes(100_000)
            await pair.cut()
            with pytest.raises(PeerUnreachable):
                await stream.receive()
        # the handler is not held until its time is over, since its caller reports that it has left
        async with asyncio.timeout(stream_resume.HOLD_S / 2):
            await pair.until_tidy()

    run(case)


def test_path_is_replaced_on_purpose_only_when_no_call_is_in_flight(run: PairRun) -> None:
    async def case(pair: Pair) -> None:
        async with pair.b.stream(pair.a.peer_id, "echo", timeout_s=30) as stream, asyncio.TaskGroup() as tasks:
            await stream.send(b"before")
            assert await stream.receive() == b"before"
            num_connections = pair.proxy.num_connections
            call = tasks.create_task(pair.b.call(pair.a.peer_id, "wait", b"small", timeout_s=30))
            await pair.asked.wait()
            replacing = tasks.create_task(pair.b._watch.replace(pair.a.peer_id))
            await asyncio.sleep(0.1)
            assert not replacing.done()
            pair.may_answer.set()
            assert await call == b"small"
            await replacing
            await stream.send(b"after")
            assert await stream.receive() == b"after"
            assert pair.proxy.num_connections > num_connections

    run(case)


# --- peers that die ---------------------------------------------------------------------------------------------------


def live_until_killed(identity_path: Path, pipe: Connection) -> None:
    async def main() -> None:
        node = await libp2p_node(identity_path)
        await node.serve_stream("echo", echo_stream)
        pipe.send((await node.addrs(), node.peer_id))
        await asyncio.Event().wait()

    asyncio.run(main())


@pytest.mark.parametrize("is_greater", [False, True])
def test_peer_that_is_killed_is_noticed_at_once(
    tmp_path: Path, is_greater: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GRACE_S", "HOLD_S", "YIELD_S"):  # nothing may wait for any of these
        monkeypatch.setattr(reconnection, name, 3600.0)
    identities = sorted((Identity.generate(), Identity.generate()), key=lambda identity: identity.peer_id)
    for name, identity in zip(("other", "near") if is_greater else ("near", "other"), identities, strict=True):
        identity.save(tmp_path / name)
    here, there = multiprocessing.Pipe()
    # a fork has all modules already, whose import takes seconds
    process = multiprocessing.get_context("fork").Process(target=live_until_killed, args=(tmp_path / "other", there))
    process.start()

    async def main() -> None:
        peers, peer_id = here.recv()
        async with (
            await libp2p_node(tmp_path / "near", peers=peers) as near,
            near.stream(peer_id, "echo", timeout_s=30) as stream,
        ):
            assert (near.peer_id > peer_id) == is_greater
            await stream.send(b"there?")
            assert await stream.receive() == b"there?"
            process.kill()
            async with asyncio.timeout(60):
                with pytest.raises(PeerUnreachable):
                    await stream.receive()

    with here, there:
        assert here.poll(30)
        asyncio.run(main())
    process.join()


# --- peers that cheat -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def raw_stream(
    caller: Libp2pNetwork, server: Libp2pNetwork, protocol: str, opening: bytes
) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await caller._host.control.open_stream(server.peer_id, caller._methods._name(*protocol.split("/")))
    writer.write(opening)
    try:
        yield reader
    finally:
        writer.transport.abort()


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Collect the ids of streams that are opened."""
    ids: list[bytes] = []

    def noted() -> bytes:
        ids.append(os.urandom(ID_BYTES))
        return ids[-1]

    monkeypatch.setattr(stream_resume, "new_id", noted)
    return ids


def test_acceptor_that_alone_lost_its_connection_makes_the_opener_resume(
    run: PairRun, tmp_path: Path, ids: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_resumed = 0
    resume = Libp2pStream._resume

    async def counted(self: Libp2pStream) -> bool:
        nonlocal num_resumed
        is_resumed = await resume(self)
        num_resumed += is_resumed
        return is_resumed

    monkeypatch.setattr(Libp2pStream, "_resume", counted)

    async def case(pair: Pair) -> None:
        a, b = pair.a, pair.b
        async with (
            await libp2p_node(tmp_path / "c", peers=await a.addrs()) as c,
            c.stream(a.peer_id, "echo", timeout_s=30) as stream,
        ):
            await stream.send(b"one")
            assert await stream.receive() == b"one"
            await b._host.control.connect(c.peer_id, await c._host.addrs())
            # only the acceptor has noticed; then both sides resume
            for asker, status, num_expected in ((b, 1, 0), (a, 0, 2)):
                async with raw_stream(asker, c, "resume/", REQUEST.pack(ids[0], 0)) as reader:
                    assert await reader.read() == ANSWER.pack(status, 0)
                await stream.send(b"two")
                assert await stream.receive() == b"two"
                assert num_resumed == num_expected

    run(case)


def test_stream_is_resumed_only_by_its_opener_and_its_id(run: PairRun, tmp_path: Path, ids: list[bytes]) -> None:
    async def case(pair: Pair) -> None:
        a, b = pair.a, pair.b
        async with (
            await libp2p_node(tmp_path / "c", peers=await a.addrs()) as c,
            b.stream(a.peer_id, "echo", timeout_s=30) as stream,
        ):
            await stream.send(b"mine")
            assert await stream.receive() == b"mine"
            for thief, stream_id in ((c, ids[0]), (b, bytes(ID_BYTES))):
                async with raw_stream(thief, a, "resume/", REQUEST.pack(stream_id, 0)) as reader:
                    assert await reader.read() == ANSWER.pack(1, 0)
            await stream.send(b"still mine")
            assert await stream.receive() == b"still mine"

    run(case)


@pytest.mark.parametrize("num_received", [1000, 2**63])
def test_stream_ends_when_a_request_claims_frames_that_were_never_sent(run: PairRun, num_received: int) -> None:
    async def case(pair: Pair) -> None:
        stream_id = b"i" * ID_BYTES
        async with raw_stream(pair.b, pair.a, "stream/hang", stream_id):
            await pair.until_running(1)
            async with raw_stream(pair.b, pair.a, "resume/", REQUEST.pack(stream_id, num_received)) as reader:
                assert await reader.readexactly(ANSWER.size) == ANSWER.pack(0, 0)
                await pair.until_running(0)

    run(case)


def test_streams_without_a_connection_are_bounded_and_held_only_for_a_while(
    run: PairRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_resume, "MAX_HELD_PER_PEER", 3)
    monkeypatch.setattr(stream_resume, "HOLD_S", 0.5)

    async def case(pair: Pair) -> None:
        async with AsyncExitStack() as stack:
            for index in range(8):
                await stack.enter_async_context(raw_stream(pair.b, pair.a, "stream/hang", bytes([index]) * ID_BYTES))
            await pair.until_running(8)
        await pair.until_running(3)
        await pair.until_running(0)

    run(case)


def test_second_stream_of_the_same_id_is_not_run(run: PairRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_resume, "HOLD_S", 0.2)

    async def case(pair: Pair) -> None:
        async with raw_stream(pair.b, pair.a, "stream/hang", bytes(ID_BYTES)):
            await pair.until_running(1)
            async with raw_stream(pair.b, pair.a, "stream/hang", bytes(ID_BYTES)) as reader:
                assert await reader.read() == b""
            assert pair.num_running == 1

    run(case)
