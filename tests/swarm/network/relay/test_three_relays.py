"""A node with reservations at three relays is reached at once, though one of them dies, drops or delays traffic.

One network serves all tests; the one that kills a relay is the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop
from support.network_worlds import eventually, libp2p_node
from swarm.network.interface import Stream
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.relay import relay
from swarm.network.relay.relay import Circuit

AT_ONCE_S = 2.0
"""Less than it takes to find that a path went silent (some 3 s): nothing may wait for that. On a busy machine it takes
up to 0.3 s; whoever measures adds what connecting takes while all is well."""

CALL_S = 60.0

NOTICED_S = 60.0
"""A path that went silent is found after some 3 s, twice that if the peer's first answer is late, and later on a busy
machine. Without another path the stream would never go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Five:
    """`hidden` and `caller` listen nowhere; `hidden` is reached through all of `relays`, and serves "echo"."""

    relays: list[Libp2pNetwork]
    hidden: Libp2pNetwork
    caller: Libp2pNetwork

    async def carrying(self) -> Libp2pNetwork:
        """Return the relay through which `caller` reaches `hidden`, once relays of earlier paths have noticed their
        end.
        """

        async def is_one() -> bool:
            return len(self.all_carrying()) == 1

        await eventually(is_one)
        return self.all_carrying()[0]

    def all_carrying(self) -> list[Libp2pNetwork]:
        """Return the relays that have a circuit from `caller` to `hidden`."""
        ends = self.caller.peer_id, self.hidden.peer_id
        return [each for each in self.relays if ends in each._relay._circuits.values()]

    async def reaches_anew(self) -> bool:
        """Connect as if for the first time, and call."""
        await self.caller._host.control.disconnect(self.hidden.peer_id)
        return await self.caller.call(self.hidden.peer_id, "echo", b"hello", timeout_s=CALL_S) == b"hello"

    async def limit_s(self) -> float:
        """Return what counts as at once: AT_ONCE_S, and what this machine needs now to connect through good relays."""
        start = time.monotonic()
        assert await self.reaches_anew()
        return AT_ONCE_S + 10 * (time.monotonic() - start)

    @contextlib.asynccontextmanager
    async def echoing(self) -> AsyncIterator[Callable[[bytes], Awaitable[bool]]]:
        async with self.caller.stream(self.hidden.peer_id, "echo", timeout_s=CALL_S) as stream:

            async def echoes(message: bytes) -> bool:
                await stream.send(message)
                return await stream.receive() == message

            yield echoes


async def open_five(folder: Path, stack: contextlib.AsyncExitStack) -> Five:
    relays: list[Libp2pNetwork] = []
    for name in ("first", "second", "third"):
        known = await relays[0].addrs() if relays else ()
        relays.append(await stack.enter_async_context(await libp2p_node(folder / name, peers=known, relay="serve")))
    peers = tuple([addr for each in relays for addr in await each.addrs()])
    hidden = await stack.enter_async_context(await libp2p_node(folder / "hidden", peers=peers, listen=(), relay="use"))

    async def echo(_peer_id: str, request: bytes) -> bytes:
        return request

    async def echo_stream(_peer_id: str, stream: Stream) -> None:
        while True:
            await stream.send(await stream.receive())

    await hidden.serve("echo", echo)
    await hidden.serve_stream("echo", echo_stream)
    caller = await stack.enter_async_context(await libp2p_node(folder / "caller", peers=peers, listen=()))
    return Five(relays=relays, hidden=hidden, caller=caller)


@dataclass(slots=True, kw_only=True)
class Fault:
    """What `relay` does to each piece that it carries: it drops it, or keeps it until the fault is over. `num_pieces`
    counts these pieces."""

    relay: Libp2pNetwork
    drops: bool
    over: asyncio.Event = field(default_factory=asyncio.Event)
    num_pieces: int = 0


class BadCircuit(Circuit):
    """Applies `fault` to the pieces that its relay carries; other relays pass everything on."""

    fault: Fault | None = None

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                fault = self.fault
                if fault is not None and self._counts is fault.relay.relay_counts:
                    fault.num_pieces += 1
                    if fault.drops:
                        continue
                    # the next fault may be of the same relay, and must not keep this piece
                    await fault.over.wait()
                writer.write(data)
                await writer.drain()
                self._num_bytes += len(data)


@contextlib.contextmanager
def faulty(relay: Libp2pNetwork, *, drops: bool) -> Iterator[Fault]:
    fault = BadCircuit.fault = Fault(relay=relay, drops=drops)
    try:
        yield fault
    finally:
        BadCircuit.fault = None
        fault.over.set()


Run = Callable[[Callable[[Five], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    async def bounded(case: Awaitable[None]) -> None:
        async with asyncio.timeout(120):
            await case

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        patch.setattr(relay, "Circuit", BadCircuit)
        stack = contextlib.AsyncExitStack()
        five = runner.run(open_five(tmp_path_factory.mktemp("relays"), stack))
        assert five.hidden.relays == {each.peer_id for each in five.relays}
        yield lambda case: runner.run(bounded(case(five)))
        runner.run(stack.aclose())


@pytest.mark.parametrize("drops", [True, False], ids=["drops", "delays"])
def test_node_with_three_relays_is_reached_when_one_drops_or_delays(run: Run, drops: bool) -> None:
    async def case(five: Five) -> None:
        limit_s, num_pieces = await five.limit_s(), 0
        for each in five.relays:
            with faulty(each, drops=drops) as fault:
                async with asyncio.timeout(limit_s):
                    assert await five.reaches_anew()
            num_pieces += fault.num_pieces
        assert num_pieces

    run(case)


def test_stream_continues_through_another_relay_when_its_own_drops_everything(run: Run) -> None:
    async def case(five: Five) -> None:
        assert await five.reaches_anew()
        async with five.echoing() as echoes:
            assert await echoes(b"before")
            with faulty(await five.carrying(), drops=True) as fault:
                async with asyncio.timeout(NOTICED_S):
                    assert await echoes(b"after")
                assert await five.carrying() is not fault.relay

    run(case)


def test_relay_that_dies_stops_neither_a_stream_nor_a_new_call(run: Run) -> None:
    async def case(five: Five) -> None:
        limit_s = await five.limit_s()
        async with five.echoing() as echoes:
            assert await echoes(b"before")
            dead = await five.carrying()
            os.kill(dead.daemon_pid, signal.SIGKILL)
            async with asyncio.timeout(limit_s):
                assert await echoes(b"after")
                assert await five.reaches_anew()

        async def is_forgotten() -> bool:
            return len(await five.hidden.addrs()) == 2 and dead.peer_id not in five.hidden.relays

        await eventually(is_forgotten)

    run(case)
