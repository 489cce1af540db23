"""The window of a stream over lines of different rates and latencies, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from swarm.network import framing
from swarm.network.libp2p.kept_frames import MAX_QUEUE_S, MIN_WINDOW_BYTES, ReceivedFrames, SentFrames
from swarm.network.peer_budgets import UnreadBudget
from swarm.testing import virtual_time

MBIT_BYTES = 125_000


class Line:
    """A line with an endless queue, over which one stream sends frames as fast as its window allows. The other side
    acknowledges as `Libp2pStream` does."""

    def __init__(self, mbit: float, round_trip_s: float) -> None:
        self.sent = SentFrames("other", UnreadBudget())
        self.queues_s: list[float] = []
        self.num_bytes = 0
        self._bytes_per_s, self._round_trip_s = mbit * MBIT_BYTES, round_trip_s
        self._free_at_s = 0.0
        self._received = ReceivedFrames()

    async def send_for(self, seconds: float, num_frame_bytes: int) -> None:
        loop, frame = asyncio.get_running_loop(), (bytes(num_frame_bytes),)
        until_s = loop.time() + seconds
        self.queues_s, self.num_bytes = [], 0
        while loop.time() < until_s:
            if not self.sent.has_room:
                await asyncio.sleep(0.001)
                continue
            self.sent.add(frame)
            self._free_at_s = max(self._free_at_s, loop.time()) + num_frame_bytes / self._bytes_per_s
            self.queues_s.append(self._free_at_s - loop.time())
            loop.call_at(self._free_at_s + self._round_trip_s / 2, self._receive, num_frame_bytes)

    def _receive(self, num_frame_bytes: int) -> None:
        self.num_bytes += num_frame_bytes
        if self._received.count(num_frame_bytes) >= framing.ACK_BYTES:
            num_frames = self._received.note_acknowledged()
            asyncio.get_running_loop().call_later(self._round_trip_s / 2, self.sent.acknowledge, num_frames)


@pytest.mark.parametrize("mbit", [1.0, 5.0, 20.0])
def test_stream_keeps_the_queue_of_a_slow_line_short_and_the_line_busy(mbit: float) -> None:
    async def main() -> None:
        line = Line(mbit, round_trip_s=0.03)
        await line.send_for(10, 2**14)
        await line.send_for(20, 2**14)
        least_s = (2 * MIN_WINDOW_BYTES + 2**14) / (mbit * MBIT_BYTES)  # it grows once to find that it should not
        assert max(line.queues_s) < max(2 * MAX_QUEUE_S, least_s)
        assert line.num_bytes > 0.85 * 20 * mbit * MBIT_BYTES

    virtual_time.run(main())


@pytest.mark.parametrize("round_trip_s", [0.01, 0.2, 0.7])
def test_stream_fills_a_fast_line_however_long_its_round_trip_is(round_trip_s: float) -> None:
    async def main() -> None:
        line = Line(mbit := 40.0, round_trip_s)
        await line.send_for(10, 2**16)
        await line.send_for(10, 2**16)
        assert line.num_bytes > 0.85 * 10 * mbit * MBIT_BYTES

    virtual_time.run(main())


def test_stream_that_is_cut_off_is_not_held_up_by_what_was_lost() -> None:
    async def main() -> None:
        sent = SentFrames("other", UnreadBudget())
        for _ in range(4):
            sent.add((bytes(2**16),))
        assert not sent.has_room
        await asyncio.sleep(10)
        list(sent.to_resend(4))
        assert sent.has_room
        sent.add((bytes(2**16),))
        sent.acknowledge(1)
        assert sent.has_room

    virtual_time.run(main())


def test_stream_whose_frames_are_not_kept_has_no_bound() -> None:
    async def main() -> None:
        sent = SentFrames("other", UnreadBudget(max_peer_bytes=2**20, max_host_bytes=2**20))
        for _ in range(8):
            sent.add((bytes(2**18),))
        assert not sent.can_resend
        assert sent.has_room

    virtual_time.run(main())
