"""Frames between two peers: coalesced, in order, bounded, with an end that both sides notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.leaks import no_leaks
from swarm.network.interface import Stream
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.serving.wire.multiplexed_connection import (
    MAX_QUEUED_BYTES,
    MAX_QUEUED_FRAMES,
    ROOM_BYTES,
    STALL_S,
    MultiplexedConnection,
    open_stream,
)
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.frames import Frames
from swarm_protocol.rows import Rows
from swarm_protocol.session_frames import SESSION_METHOD, CloseSequence, Frame, ServerLeaving, StepResult

METHOD = f"{SESSION_METHOD}/tiny"
MIB_ROWS = Rows(codec="raw", num_rows=64, num_columns=4096, payload=bytes(2**20))


def close(number: int) -> CloseSequence:
    return CloseSequence(sequence_id=bytes([number]) * 16)


def bulk() -> StepResult:
    return StepResult(sequence_id=bytes(16), position=64, rows=MIB_ROWS)


@dataclass
class Pair:
    """A client's connection, and the server's end of it."""

    near: MultiplexedConnection
    far: MultiplexedConnection
    far_network: MemoryNetwork
    internet: MemoryInternet
    heard_near: list[Frame] = field(default_factory=list)
    heard_far: list[Frame] = field(default_factory=list)


@asynccontextmanager
async def pair(on_far: Callable[[Frame], None] | None = None) -> AsyncIterator[Pair]:
    internet = MemoryInternet(detection_s=0.0)
    here, there = internet.network(), internet.network()
    accepted: asyncio.Future[MultiplexedConnection] = asyncio.get_running_loop().create_future()
    heard: list[Frame] = []

    async def accept(peer_id: str, stream: Stream) -> None:
        connection = MultiplexedConnection(stream, peer_id)
        accepted.set_result(connection)
        await connection.run(on_far or heard.append)
        if isinstance(connection.error, PeerViolation):
            raise connection.error

    await there.serve_stream(METHOD, accept)
    async with open_stream(here, there.peer_id, "tiny") as stream, asyncio.TaskGroup() as tasks:
        near = MultiplexedConnection(stream, there.peer_id)
        heard_near: list[Frame] = []
        running = tasks.create_task(near.run(heard_near.append))
        yield Pair(near, await accepted, there, internet, heard_near, heard)
        running.cancel()
    await here.close()
    await there.close()


def _num_rows(frame: Frame) -> int:
    return frame.rows.num_rows if isinstance(frame, StepResult) and frame.rows is not None else 0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.01)


def test_connection_sends_waiting_frames_as_one_message_in_order() -> None:
    async def scenario() -> None:
        async with pair() as connections:
            for number in range(16):
                connections.near.send(close(number))
            await until(lambda: len(connections.heard_far) == 16)
            assert connections.heard_far == [close(number) for number in range(16)]
            assert connections.near.num_messages == 1
            connections.far.send(ServerLeaving(within_s=1.0))
            await until(lambda: connections.heard_near == [ServerLeaving(within_s=1.0)])

    virtual_time.run(scenario())


def test_connection_keeps_few_frames_for_a_peer_that_does_not_read_however_short_they_are() -> None:
    async def scenario() -> None:
        async with pair() as connections:
            for _ in range(MAX_QUEUED_FRAMES):
                connections.near.send(close(1))
            assert connections.near.error is None
            connections.near.send(close(1))
            assert isinstance(connections.near.error, PeerTimeout)
            with pytest.raises(PeerTimeout, match="does not read"):
                connections.near.send(close(1))

    virtual_time.run(scenario())


def test_frames_of_other_sequences_overtake_the_rows_of_a_prompt() -> None:
    async def scenario() -> None:
        async with pair() as connections:
            for _ in range(4):
                connections.near.send(bulk())
            for number in range(1, 201):
                connections.near.send(close(number))
            await until(lambda: sum(_num_rows(frame) for frame in connections.heard_far) == 4 * MIB_ROWS.num_rows)
            assert connections.heard_far[:200] == [close(number) for number in range(1, 201)]
            assert connections.near.num_messages < 16

    virtual_time.run(scenario())


class SlowStream:
    """A stream over a line of 5 Mbit/s, on which nothing is received."""

    def __init__(self) -> None:
        self.sent: list[Frame] = []

    async def send(self, message: bytes) -> None:
        await asyncio.sleep(len(message) / 625_000)
        self.sent += Frames.from_bytes(message).frames

    async def receive(self) -> bytes:
        await asyncio.Event().wait()
        return b""


def test_token_on_a_slow_line_waits_for_a_part_of_the_rows_before_it() -> None:
    async def scenario() -> None:
        clock, stream, waits_s = asyncio.get_running_loop().time, SlowStream(), list[float]()
        connection = MultiplexedConnection(stream, "other")  # type: ignore[arg-type]
        running = asyncio.create_task(connection.run(lambda frame: None))
        for _ in range(8):
            connection.send(bulk())
        while connection._queue.num_frames > 1:
            sent_s = clock()
            connection.send(close(1))
            await until(lambda: close(1) in stream.sent)
            waits_s.append(clock() - sent_s)
            stream.sent.remove(close(1))
            await asyncio.sleep(0.3)
        running.cancel()
        await asyncio.wait((running,))
        assert len(waits_s) > 20
        assert max(waits_s) < 0.5

    virtual_time.run(scenario())


def test_connection_sends_its_waiting_frames_before_it_ends() -> None:
    async def scenario() -> None:
        async with pair() as connections:
            connections.far.send(close(1))
            connections.far.end()
            await until(lambda: connections.near.error)
            assert connections.heard_near == [close(1)]
            assert isinstance(connections.near.error, PeerUnreachable)
            with pytest.raises(PeerUnreachable):
                connections.near.send(close(2))
            with pytest.raises(PeerUnreachable):
                await connections.near.room()

    virtual_time.run(scenario())


def test_connection_to_a_peer_that_dies_ends() -> None:
    async def scenario() -> None:
        async with pair() as connections:
            connections.internet.crash(connections.far_network.peer_id)
            await until(lambda: connections.near.error)
            assert isinstance(connections.near.error, PeerUnreachable)
            assert connections.near.error.peer_id == connections.far_network.peer_id

    virtual_time.run(scenario())


def test_connection_that_is_cancelled_ends_both_sides_and_leaves_nothing() -> None:
    async def scenario() -> None:
        with no_leaks():
            async with pair() as connections:
                connections.near.send(close(1))
                await until(lambda: connections.heard_far)
            assert connections.near.error is not None
            assert connections.far.error is not None

    virtual_time.run(scenario())


def test_connection_names_the_peer_that_sent_an_invalid_frame() -> None:
    def refuse(frame: Frame) -> None:
        raise PeerViolation("that is nonsense")

    async def scenario() -> None:
        async with pair(refuse) as connections:
            connections.near.send(close(1))
            await until(lambda: connections.near.error)
            assert isinstance(connections.far.error, PeerViolation)
            assert connections.far.error.peer_id == connections.near._stream.other.peer_id  # type: ignore[attr-defined]
            assert isinstance(connections.near.error, PeerViolation)

    virtual_time.run(scenario())


def test_connection_raises_a_violation_when_bytes_are_no_frames() -> None:
    async def scenario() -> None:
        async with pair() as connections:
            await connections.near._stream.send(b"\x01nonsense")
            await until(lambda: connections.far.error)
            assert isinstance(connections.far.error, PeerViolation)

    virtual_time.run(scenario())


@asynccontextmanager
async def deaf_peer() -> AsyncIterator[MultiplexedConnection]:
    """Open a connection to a peer that reads nothing."""
    internet = MemoryInternet()
    here, there = internet.network(), internet.network()

    async def accept(_peer_id: str, _stream: Stream) -> None:
        await asyncio.Event().wait()

    await there.serve_stream(METHOD, accept)
    async with open_stream(here, there.peer_id, "tiny") as stream, asyncio.TaskGroup() as tasks:
        connection = MultiplexedConnection(stream, there.peer_id)
        running = tasks.create_task(connection.run(lambda frame: None))
        yield connection
        running.cancel()
    await here.close()
    await there.close()


def test_connection_to_a_peer_that_does_not_read_has_no_room_and_ends() -> None:
    async def scenario() -> SwarmError | None:
        async with deaf_peer() as connection:
            began_s = asyncio.get_running_loop().time()
            for _ in range(ROOM_BYTES // 2**20 + 8):
                await connection.room()
                connection.send(bulk())
                await asyncio.sleep(0)
                if not connection._has_room.is_set():
                    break
            with pytest.raises(PeerTimeout, match="does not read"):
                await connection.room()
            assert STALL_S <= asyncio.get_running_loop().time() - began_s < 2 * STALL_S
            return connection.error

    assert isinstance(virtual_time.run(scenario()), PeerTimeout)


def flood(connection: MultiplexedConnection) -> None:
    for _ in range(MAX_QUEUED_BYTES // 2**20 + 2):
        connection.send(bulk())


def test_connection_bounds_the_frames_of_a_sender_that_cannot_wait() -> None:
    async def scenario() -> None:
        async with deaf_peer() as connection:
            with pytest.raises(PeerTimeout, match="does not read"):
                flood(connection)
            assert not connection._queue.num_frames

    virtual_time.run(scenario())


class Sink:
    """A stream to a peer that takes every message at once, and sends nothing."""

    async def send(self, message: bytes) -> None:
        """Drop the message."""

    async def receive(self) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async def finish(self) -> None:
        """Do nothing."""


def test_messages_that_need_no_waiting_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop, num_timers, call_at = asyncio.get_running_loop(), 0, asyncio.get_running_loop().call_at

        def counted(*arguments: Any) -> asyncio.TimerHandle:
            nonlocal num_timers
            num_timers += 1
            return call_at(*arguments)

        connection = MultiplexedConnection(Sink(), "peer")
        running = asyncio.create_task(connection.run(lambda frame: None))
        with monkeypatch.context() as patched:
            patched.setattr(loop, "call_at", counted)
            for number in range(20):
                connection.send(close(number))
                while connection.num_messages <= number:
                    await asyncio.sleep(0)
        running.cancel()
        assert num_timers == 1

    asyncio.run(scenario())


def test_connection_to_a_peer_that_only_takes_frames_lasts_for_hours() -> None:
    async def scenario() -> None:
        async with pair() as both:
            for number in range(20):
                both.near.send(close(number))
                await asyncio.sleep(600)
            assert both.near.error is None
            assert len(both.heard_far) == 20

    virtual_time.run(scenario())


def test_open_stream_to_a_peer_that_serves_no_model_is_refused() -> None:
    async def scenario() -> None:
        internet = MemoryInternet()
        here, there = internet.network(), internet.network()
        with pytest.raises(PeerRefused):
            async with open_stream(here, there.peer_id, "tiny"):
                pass
        await here.close()
        await there.close()

    virtual_time.run(scenario())
