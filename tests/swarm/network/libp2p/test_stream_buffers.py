"""Frames from bytes that arrive in any pieces, some of them before the wire exists, over a socket pair."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from swarm.network import framing
from swarm.network.framing import Kind
from swarm.network.libp2p.stream_buffers import MAX_FRAMES_AT_ONCE, SCRATCH_BYTES, StreamBuffers
from swarm.network.rate import Allowance, write
from swarm_protocol.errors import PeerViolation

Frame = tuple[Kind, int, bytes]
BODIES = [b"", b"a", bytes(2000), bytes(SCRATCH_BYTES - 5), b"b" * SCRATCH_BYTES, b"c" * framing.CHUNK_BYTES, b"d"]
WIRE = b"".join(framing.frame(Kind.DATA, body) for body in BODIES) + framing.credit(7) + framing.frame(Kind.FINISH)
FRAMES: list[Frame] = [(Kind.DATA, len(body), body) for body in BODIES] + [(Kind.CREDIT, 7, b""), (Kind.FINISH, 0, b"")]


class Near:
    """The wire's side of a socket pair; `far` is the other side."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.announced: list[tuple[Kind, int]] = []
        self.unwanted: set[int] = set()  # lengths
        self.wire = StreamBuffers(self._announce, self._accept, Allowance())
        self._near, self.far = socket.socketpair()
        for side in (self._near, self.far):
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                side.setsockopt(socket.SOL_SOCKET, buffer, 1 << 18)
        self.far.setblocking(False)

    async def __aenter__(self) -> Near:
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self._near)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()
        self.far.close()
        await asyncio.sleep(0)

    async def run(self) -> None:
        async with asyncio.timeout(60):
            await self.wire.run(self.reader, self.writer.transport)  # type: ignore[arg-type]

    def _announce(self, kind: Kind, length: int) -> bool:
        self.announced.append((kind, length))
        return length not in self.unwanted

    def _accept(self, *frame: object) -> None:
        self.frames.append(frame)  # type: ignore[arg-type]


def in_each_loop(case: Callable[[Near], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Near() as near:
            await case(near)

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())


@pytest.mark.parametrize("step", [1000, SCRATCH_BYTES + 1, 1 << 30])
def test_frames_are_announced_once_and_skipped_when_unwanted(step: int) -> None:
    async def case(near: Near) -> None:
        near.unwanted = {2000, SCRATCH_BYTES, framing.CHUNK_BYTES}
        running = asyncio.create_task(near.run())
        for at in range(0, len(WIRE), step):
            await asyncio.get_running_loop().sock_sendall(near.far, WIRE[at : at + step])
            await asyncio.sleep(0)
        near.far.close()
        await running
        assert near.frames == [frame for frame in FRAMES if frame[1] not in near.unwanted]
        assert near.announced == [(kind, length) for kind, length, _ in FRAMES]

    in_each_loop(case)


def test_long_body_that_is_dropped_half_way_is_not_kept() -> None:
    async def case(near: Near) -> None:
        wire = framing.frame(Kind.DATA, bytes(framing.CHUNK_BYTES)) + framing.frame(Kind.DATA, b"next")
        running = asyncio.create_task(near.run())
        await asyncio.get_running_loop().sock_sendall(near.far, wire[: framing.CHUNK_BYTES // 2])
        async with asyncio.timeout(60):
            while not near.wire._body:
                await asyncio.sleep(0)
        near.wire.drop_body()
        assert not near.wire._body
        await asyncio.get_running_loop().sock_sendall(near.far, wire[framing.CHUNK_BYTES // 2 :])
        near.far.close()
        await running
        assert near.frames == [(Kind.DATA, 4, b"next")]

    in_each_loop(case)


@pytest.mark.parametrize("step", [1 << 30, 50_000, 16_389])
def test_frames_arrive_whole_and_in_order_however_their_bytes_are_split(step: int) -> None:
    async def case(near: Near) -> None:
        running = asyncio.create_task(near.run())
        for at in range(0, len(WIRE), step):
            await asyncio.get_running_loop().sock_sendall(near.far, WIRE[at : at + step])
            await asyncio.sleep(0)
        near.far.close()
        await running
        assert near.frames == FRAMES

    in_each_loop(case)


def test_bytes_received_before_the_wire_exists_are_its_first() -> None:
    async def case(near: Near) -> None:
        await asyncio.get_running_loop().sock_sendall(near.far, b"!" + WIRE[:20_100])  # in the middle of a body
        assert await near.reader.readexactly(1) == b"!"  # the reader has everything that was sent
        running = asyncio.create_task(near.run())
        await asyncio.get_running_loop().sock_sendall(near.far, WIRE[20_100:])
        near.far.close()
        await running
        assert near.frames == FRAMES

    in_each_loop(case)


def test_wire_ends_when_the_other_side_left_before_it_existed() -> None:
    async def case(near: Near) -> None:
        await asyncio.get_running_loop().sock_sendall(near.far, WIRE[:2010])
        near.far.close()
        while not near.reader._eof:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        await near.run()
        assert near.frames == FRAMES[:2]

    in_each_loop(case)


def test_frame_that_is_refused_when_announced_gets_no_memory_and_ends_the_reading() -> None:
    async def case(near: Near) -> None:
        def refuse(kind: Kind, length: int) -> None:
            raise PeerViolation("too much")

        near.wire._announced = refuse
        await asyncio.get_running_loop().sock_sendall(
            near.far, framing.HEADER.pack(Kind.DATA, framing.CHUNK_BYTES) + b"x" * 100
        )
        with pytest.raises(PeerViolation, match="too much"):
            await near.run()
        assert not near.wire._body
        assert not near.frames

    in_each_loop(case)


def test_violation_before_the_wire_exists_ends_it_even_after_a_long_body() -> None:
    async def case(near: Near) -> None:
        bad = framing.frame(Kind.DATA, b"f" * SCRATCH_BYTES) + framing.frame(Kind.DATA, b"g") + b"\xff" * 5
        await asyncio.get_running_loop().sock_sendall(near.far, b"!" + bad)
        assert await near.reader.readexactly(1) == b"!"
        with pytest.raises(PeerViolation):
            await near.run()
        await asyncio.get_running_loop().sock_sendall(near.far, framing.frame(Kind.DATA, b"h"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert near.frames == [(Kind.DATA, SCRATCH_BYTES, b"f" * SCRATCH_BYTES), (Kind.DATA, 1, b"g")]

    in_each_loop(case)


def test_bytes_after_a_violation_are_discarded() -> None:
    async def case(near: Near) -> None:
        def refuse(kind: Kind, length: int) -> None:
            raise PeerViolation("too much")

        near.wire._announced = refuse
        await asyncio.get_running_loop().sock_sendall(near.far, framing.HEADER.pack(Kind.DATA, 9) * 10_000)
        with pytest.raises(PeerViolation, match="too much"):
            await near.run()
        assert near.wire._num_scratch == len(near.wire._scratch)
        assert near.wire.get_buffer(-1)

    in_each_loop(case)


def test_writer_before_the_wire_runs_lets_it_begin_and_then_waits_for_room() -> None:
    async def case(near: Near) -> None:
        running = asyncio.create_task(near.run())
        assert not near.wire.has_room
        await near.wire.drained()
        assert near.wire.has_room
        near.writer.write(bytes(4 << 20))
        assert not near.wire.has_room
        near.far.close()
        await running

    in_each_loop(case)


def test_drained_returns_before_the_wire_runs() -> None:
    async def case(near: Near) -> None:
        async with asyncio.timeout(60):
            await near.wire.drained()

    in_each_loop(case)


def test_drained_waits_until_the_system_has_all_and_raises_when_the_connection_is_lost() -> None:
    async def case(near: Near) -> None:
        running = asyncio.create_task(near.run())
        await asyncio.sleep(0)
        near.writer.write(bytes(4 << 20))
        assert not near.wire.has_room
        draining = asyncio.create_task(near.wire.drained())
        taken = 0
        while taken < 4 << 20:
            assert not draining.done() or taken > 3 << 20
            taken += len(await asyncio.get_running_loop().sock_recv(near.far, 1 << 18))
        await draining
        assert near.wire.has_room
        near.writer.write(bytes(4 << 20))
        near.far.close()
        with pytest.raises(ConnectionError):
            await near.wire.drained()
        await running

    in_each_loop(case)


def test_buffered_long_bodies_arrive_one_in_each_turn_of_the_loop() -> None:
    body = b"e" * 2 * SCRATCH_BYTES

    async def case(near: Near) -> None:
        seen: list[int] = []  # frames at the beginning of each turn of the loop

        async def turns() -> None:
            while len(near.frames) < 5:
                seen.append(len(near.frames))
                await asyncio.sleep(0)

        running = asyncio.create_task(near.run())
        await near.wire.drained()
        data = framing.frame(Kind.DATA, body) * 5
        assert near.far.send(data) == len(data)
        await turns()
        near.far.close()
        await running
        assert near.frames == [(Kind.DATA, len(body), body)] * 5
        assert set(seen) == {0, 1, 2, 3, 4}

    in_each_loop(case)


@pytest.mark.parametrize("num_before", [0, 5000])
def test_short_frames_leave_the_loop_after_a_few(num_before: int) -> None:
    """`num_before` come before the wire exists."""
    one = framing.acknowledgement(0)

    async def case(near: Near) -> None:
        most, before = 0, 0
        await asyncio.get_running_loop().sock_sendall(near.far, b"!" + one * num_before)
        assert await near.reader.readexactly(1) == b"!"
        running = asyncio.create_task(near.run())
        await near.wire.drained()
        rest = one * (20_000 - num_before)
        assert near.far.send(rest) == len(rest)
        while len(near.frames) < 20_000:
            await asyncio.sleep(0)
            most, before = max(most, len(near.frames) - before), len(near.frames)
        near.far.close()
        await running
        assert most <= 2 * MAX_FRAMES_AT_ONCE, "the rest of one read, and the next one"
        assert near.frames == [(Kind.ACK, 0, b"")] * 20_000

    in_each_loop(case)


@pytest.mark.parametrize("num_bytes", [1, 300])
def test_frames_of_many_reads_leave_the_loop_after_a_few(num_bytes: int) -> None:
    """One read holds fewer than MAX_FRAMES_AT_ONCE of the longer ones."""
    one = framing.frame(Kind.DATA, bytes(num_bytes))
    num_frames = 2**17 // len(one)

    async def case(near: Near) -> None:
        most, before = 0, 0
        running = asyncio.create_task(near.run())
        await near.wire.drained()
        rest = one * num_frames
        assert near.far.send(rest) == len(rest)
        while len(near.frames) < num_frames:
            await asyncio.sleep(0)
            most, before = max(most, len(near.frames) - before), len(near.frames)
        near.far.close()
        await running
        assert most <= MAX_FRAMES_AT_ONCE

    in_each_loop(case)


def test_connection_lost_before_it_is_taken_over_ends_after_its_received_frames() -> None:
    async def case(near: Near) -> None:
        await asyncio.get_running_loop().sock_sendall(near.far, framing.frame(Kind.DATA, b"a"))
        while not near.reader._buffer:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        near.writer.transport.abort()
        await asyncio.sleep(0.01)  # its loop has closed it
        await near.run()
        assert near.frames == [(Kind.DATA, 1, b"a")]
        assert near.wire.is_lost
        write(near.writer, b"to nobody")
        with pytest.raises(ConnectionError):
            await near.wire.drained()

    in_each_loop(case)
