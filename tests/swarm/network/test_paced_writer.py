"""Streams that share a limited upload in turns, in virtual time and over connections that accept all bytes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from swarm.network import rate
from swarm.network.rate import BURST_S, MAX_DEBT_S, OVERHEAD, SLICE_BYTES, Allowance, PacedWriter, Turns
from swarm.testing import virtual_time

RATE = 1e6


class Connection:
    """A connection that records what is written, and when."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.times_s: list[float] = []
        self.is_closed = False
        self.transport = self

    def is_closing(self) -> bool:
        return self.is_closed

    def write(self, data: bytes | memoryview) -> None:
        self.written += data
        self.times_s.append(asyncio.get_running_loop().time())

    def writelines(self, parts: Sequence[bytes | memoryview]) -> None:
        for part in parts:
            self.write(part)


def _writer(turns: Turns) -> tuple[PacedWriter, Connection]:
    connection = Connection()
    return PacedWriter(cast("Any", connection), turns), connection


def test_long_frames_of_several_streams_share_the_limit_equally() -> None:
    async def main() -> None:
        turns = Turns(Allowance(RATE))
        pairs = [_writer(turns) for _ in range(3)]
        began_s = asyncio.get_running_loop().time()
        for index, (writer, _) in enumerate(pairs):
            writer.write((bytes([index]) * 500_000, bytes([index + 10]) * 500_000), at_once=False)
        await asyncio.sleep(1.0)
        shares = [len(connection.written) for _, connection in pairs]
        # the first stream has used the idle time before it
        assert max(shares) - min(shares) <= SLICE_BYTES + BURST_S * RATE
        for writer, _ in pairs:
            await writer.emptied()
        took_s = asyncio.get_running_loop().time() - began_s
        assert 0.97 * RATE < OVERHEAD * 3e6 / took_s < 1.03 * RATE
        for index, (_, connection) in enumerate(pairs):
            assert connection.written == bytes([index]) * 500_000 + bytes([index + 10]) * 500_000

    virtual_time.run(main())


def test_short_frame_waits_for_one_slice_of_each_other_stream_at_most() -> None:
    async def main() -> None:
        turns = Turns(Allowance(RATE))
        for _ in range(4):
            _writer(turns)[0].write((bytes(2**20),), at_once=False)
        await asyncio.sleep(0.5)
        short, connection = _writer(turns)
        began_s = asyncio.get_running_loop().time()
        short.write((b"token",), at_once=False)
        await short.emptied()
        assert connection.written == b"token"
        assert asyncio.get_running_loop().time() - began_s <= 5 * SLICE_BYTES * OVERHEAD / RATE

    virtual_time.run(main())


def test_urgent_frame_is_not_delayed_and_stays_in_the_order_of_its_stream() -> None:
    async def main() -> None:
        turns = Turns(Allowance(RATE))
        busy, connection = _writer(turns)
        busy.write((b"x" * 100_000,), at_once=False)
        busy.write((b"credit",), at_once=True)
        idle, other = _writer(turns)
        idle.write((b"credit",), at_once=True)
        assert other.written == b"credit"
        await busy.emptied()
        assert connection.written == b"x" * 100_000 + b"credit"

    virtual_time.run(main())


def test_calls_are_charged_and_delay_streams_for_a_bounded_time() -> None:
    async def main() -> None:
        allowance = Allowance(RATE)
        turns = Turns(allowance)
        turns.charge(500_000)
        writer, _ = _writer(turns)
        began_s = asyncio.get_running_loop().time()
        writer.write((b"x",), at_once=False)
        await writer.emptied()
        waited_s = asyncio.get_running_loop().time() - began_s
        assert 0.4 < waited_s < 0.6
        turns.charge(10**12)
        assert allowance.wait_s() <= MAX_DEBT_S

    virtual_time.run(main())


def test_without_a_limit_everything_is_written_at_once() -> None:
    async def main() -> None:
        writer, connection = _writer(Turns(Allowance()))
        writer.write((b"head", memoryview(bytes(2**20))), at_once=False)
        assert writer.is_empty
        assert len(connection.written) == 4 + 2**20

    virtual_time.run(main())


def test_end_of_a_stream_flushes_it_and_a_lost_connection_drops_it() -> None:
    async def main() -> None:
        turns = Turns(Allowance(RATE))
        ending, connection = _writer(turns)
        ending.write((bytes(300_000),), at_once=False)
        ending.flush()
        assert len(connection.written) == 300_000
        lost, broken = _writer(turns)
        lost.write((bytes(300_000),), at_once=False)
        broken.is_closed = True
        async with asyncio.timeout(5):
            await lost.emptied()
        assert len(broken.written) < 300_000

    virtual_time.run(main())


def test_stream_that_drops_its_frames_and_begins_anew_has_one_turn() -> None:
    async def main() -> None:
        turns = Turns(Allowance(RATE))
        turns.charge(int(BURST_S * RATE) + SLICE_BYTES)
        (again, one), (steady, other) = _writer(turns), _writer(turns)
        for _ in range(5):
            again.write((bytes(400_000),), at_once=False)
            steady.write((bytes(80_000),), at_once=False)
            again.drop()
        again.write((bytes(400_000),), at_once=False)
        await asyncio.sleep(0.5)
        assert abs(len(one.written) - len(other.written)) <= SLICE_BYTES

    virtual_time.run(main())


def test_write_joins_its_parts_on_a_python_whose_writelines_never_has_drain_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate, "WRITELINES_NEVER_PAUSES", True)
    writer = MagicMock(**{"transport.is_closing.return_value": False})
    rate.write(writer, b"head", memoryview(b"body"))
    writer.write.assert_called_once_with(b"headbody")
    writer.writelines.assert_not_called()
