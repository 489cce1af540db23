"""Frames between two peers: coalesced, in order, bounded, and an end that both sides hear of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
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
from swarm.testing.leaks import no_leaks
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
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
    """A client's lane, and the lane that a server made of it."""

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
        lane = MultiplexedConnection(stream, peer_id)
        accepted.set_result(lane)
        await lane.run(on_far or heard.append)
        if isinstance(lane.error, PeerViolation):
            raise lane.error

    await there.serve_stream(METHOD, accept)
    async with open_stream(here, there.peer_id, "tiny") as stream, asyncio.TaskGroup() as tasks:
        near = MultiplexedConnection(stream, there.peer_id)
        heard_near: list[Frame] = []
        running = tasks.create_task(near.run(heard_near.append))
        yield Pair(near, await accepted, there, internet, heard_near, heard)
        running.cancel()
    await here.close()
    await there.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.01)


def test_lane_sends_what_gathered_as_one_message_in_order() -> None:
    async def scenario() -> None:
        async with pair() as lanes:
            for number in range(16):
                lanes.near.send(close(number))
            await until(lambda: len(lanes.heard_far) == 16)
            assert lanes.heard_far == [close(number) for number in range(16)]
            assert lanes.near.num_messages == 1
            lanes.far.send(ServerLeaving(within_s=1.0))
            await until(lambda: lanes.heard_near == [ServerLeaving(within_s=1.0)])

    virtual_time.run(scenario())


def test_lane_keeps_few_frames_for_a_peer_that_does_not_read_however_short_they_are() -> None:
    async def scenario() -> None:
        async with pair() as lanes:
            for _ in range(MAX_QUEUED_FRAMES):
                lanes.near.send(close(1))
            assert lanes.near.error is None
            lanes.near.send(close(1))
            assert isinstance(lanes.near.error, PeerTimeout)
            with pytest.raises(PeerTimeout, match="does not read"):
                lanes.near.send(close(1))

    virtual_time.run(scenario())


def test_lane_keeps_messages_small_so_that_no_frame_waits_long() -> None:
    async def scenario() -> None:
        async with pair() as lanes:
            for _ in range(4):
                lanes.near.send(bulk())
            for number in range(200):
                lanes.near.send(close(number))
            await until(lambda: len(lanes.heard_far) == 204)
            assert lanes.near.num_messages == 5

    virtual_time.run(scenario())


def test_lane_that_ends_sends_what_was_left_first() -> None:
    async def scenario() -> None:
        async with pair() as lanes:
            lanes.far.send(close(1))
            lanes.far.end()
            await until(lambda: lanes.near.error)
            assert lanes.heard_near == [close(1)]
            assert isinstance(lanes.near.error, PeerUnreachable)
            with pytest.raises(PeerUnreachable):
                lanes.near.send(close(2))
            with pytest.raises(PeerUnreachable):
                await lanes.near.room()

    virtual_time.run(scenario())


def test_lane_to_a_peer_that_dies_ends() -> None:
    async def scenario() -> None:
        async with pair() as lanes:
            lanes.internet.crash(lanes.far_network.peer_id)
            await until(lambda: lanes.near.error)
            assert isinstance(lanes.near.error, PeerUnreachable)
            assert lanes.near.error.peer_id == lanes.far_network.peer_id

    virtual_time.run(scenario())


def test_lane_that_is_cancelled_ends_both_sides_and_leaves_nothing() -> None:
    async def scenario() -> None:
        with no_leaks():
            async with pair() as lanes:
                lanes.near.send(close(1))
                await until(lambda: lanes.heard_far)
            assert lanes.near.error is not None
            assert lanes.far.error is not None

    virtual_time.run(scenario())


def test_lane_tells_who_sent_nonsense() -> None:
    def refuse(frame: Frame) -> None:
        raise PeerViolation("that is nonsense")

    async def scenario() -> None:
        async with pair(refuse) as lanes:
            lanes.near.send(close(1))
            await until(lambda: lanes.near.error)
            assert isinstance(lanes.far.error, PeerViolation)
            assert lanes.far.error.peer_id == lanes.near._stream.other.peer_id  # type: ignore[attr-defined]
            assert isinstance(lanes.near.error, PeerViolation)

    virtual_time.run(scenario())


def test_lane_of_bytes_that_are_no_frames_is_a_violation() -> None:
    async def scenario() -> None:
        async with pair() as lanes:
            await lanes.near._stream.send(b"\x01nonsense")
            await until(lambda: lanes.far.error)
            assert isinstance(lanes.far.error, PeerViolation)

    virtual_time.run(scenario())


@asynccontextmanager
async def deaf_peer() -> AsyncIterator[MultiplexedConnection]:
    """A lane to a peer that reads nothing."""
    internet = MemoryInternet()
    here, there = internet.network(), internet.network()

    async def accept(_peer_id: str, _stream: Stream) -> None:
        await asyncio.Event().wait()

    await there.serve_stream(METHOD, accept)
    async with open_stream(here, there.peer_id, "tiny") as stream, asyncio.TaskGroup() as tasks:
        lane = MultiplexedConnection(stream, there.peer_id)
        running = tasks.create_task(lane.run(lambda frame: None))
        yield lane
        running.cancel()
    await here.close()
    await there.close()


def test_lane_to_a_peer_that_does_not_read_has_no_room_and_ends() -> None:
    async def scenario() -> SwarmError | None:
        async with deaf_peer() as lane:
            began_s = asyncio.get_running_loop().time()
            for _ in range(ROOM_BYTES // 2**20 + 8):
                await lane.room()
                lane.send(bulk())
                await asyncio.sleep(0)
                if not lane._has_room.is_set():
                    break
            with pytest.raises(PeerTimeout, match="does not read"):
                await lane.room()
            assert STALL_S <= asyncio.get_running_loop().time() - began_s < 2 * STALL_S
            return lane.error

    assert isinstance(virtual_time.run(scenario()), PeerTimeout)


def flood(lane: MultiplexedConnection) -> None:
    for _ in range(MAX_QUEUED_BYTES // 2**20 + 2):
        lane.send(bulk())


def test_lane_of_a_sender_that_cannot_wait_is_bounded() -> None:
    async def scenario() -> None:
        async with deaf_peer() as lane:
            with pytest.raises(PeerTimeout, match="does not read"):
                flood(lane)
            assert lane._num_queued_bytes == 0

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
