"""One circuit whose ends fail as network connections do, over scripted streams and in virtual time."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Iterable
from typing import Any, cast

import pytest
from swarm.network.libp2p.host import RawStream
from swarm.network.relay.relay import Circuit, RelayCounts
from swarm.network.relay.relay_access import Ends, RelayBudget
from swarm.testing import virtual_time

IDLE_S = 100.0


class Writer:
    """A writer that, once closed, raises at a write, as uvloop's does."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.is_closed = False
        self.transport = self

    def write(self, data: bytes) -> None:
        if self.is_closed:
            raise RuntimeError("unable to perform operation on a closed transport")
        self.written += data

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.write(b"".join(parts))

    async def drain(self) -> None:
        if self.is_closed:
            raise ConnectionResetError

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    async def wait_closed(self) -> None: ...


def end() -> tuple[asyncio.StreamReader, Writer]:
    return asyncio.StreamReader(), Writer()


async def run(one: tuple[asyncio.StreamReader, Writer], other: tuple[asyncio.StreamReader, Writer]) -> None:
    circuit = Circuit(cast("RawStream", one), cast("RawStream", other), RelayCounts(), RelayBudget())
    async with asyncio.timeout(IDLE_S / 2):
        await circuit.run(IDLE_S)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EHOSTUNREACH, "No route to host"),
        TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    ],
)
def test_circuit_ends_and_closes_the_other_end_when_one_end_fails(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        one, other = end(), end()
        one[0].feed_data(b"the last words")
        asyncio.get_running_loop().call_later(1.0, one[0].set_exception, error)
        await run(one, other)
        assert other[1].written == b"the last words"
        assert other[1].is_closed

    virtual_time.run(main())  # it raises what no task has retrieved
    assert not caplog.records


def test_circuit_ends_when_bytes_arrive_for_a_closed_end() -> None:
    async def main() -> None:
        one, other = end(), end()
        other[1].close()
        one[0].feed_data(b"too late")
        await run(one, other)
        assert not other[1].written

    virtual_time.run(main())


def test_defect_ends_one_circuit_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)

    async def main() -> None:
        one, other = end(), end()

        def write(_data: bytes) -> None:
            raise AssertionError("a defect")

        cast("Any", other[1]).write = write
        one[0].feed_data(b"anything")
        await run(one, other)
        assert one[1].is_closed

    virtual_time.run(main())
    assert "a circuit failed" in caplog.text


class NotedBudget(RelayBudget):
    """A budget that adds up how long all circuits have waited."""

    waited_s = 0.0

    async def take(self, ends: Ends, num_bytes: int) -> float:
        waited_s = await super().take(ends, num_bytes)
        self.waited_s += waited_s
        return waited_s


def test_time_that_circuits_wait_side_by_side_is_counted_for_each() -> None:
    async def main() -> None:
        budget, counts = NotedBudget(100_000), RelayCounts()
        circuits = []
        for number in range(3):
            one, other = end(), end()
            one[0].feed_data(bytes(300_000))
            one[0].feed_eof()
            peers = f"source {number}", f"target {number}"
            circuits.append(Circuit(cast("RawStream", one), cast("RawStream", other), counts, budget, peers))
        await asyncio.gather(*(circuit.run(IDLE_S) for circuit in circuits))
        assert counts.throttled_s == pytest.approx(budget.waited_s)
        assert counts.throttled_s > 10

    virtual_time.run(main())
