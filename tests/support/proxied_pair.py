"""Two real hosts with a proxy between them that can cut their connections or swallow what they carry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvloop
from support.free_ports import free_port
from support.network_worlds import eventually, libp2p_node
from support.wan_proxy import LINKS, WanProxy
from swarm.network.interface import EndOfStream, Stream
from swarm.network.libp2p_network import Libp2pNetwork


async def echo_stream(_peer_id: str, stream: Stream) -> None:
    with contextlib.suppress(EndOfStream):
        while True:
            await stream.send(await stream.receive())


class Pair:
    """Two hosts: `b` reaches `a` only through the proxy, and `a` reaches `b` over the connections of `b`. Both serve
    streams "echo" and "hang", and calls "wait", which are answered once `may_answer` is set.
    """

    def __init__(self, a: Libp2pNetwork, b: Libp2pNetwork, proxy: WanProxy) -> None:
        self.a, self.b, self.proxy = a, b, proxy
        self.num_running = 0  # handlers of "hang"
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def serve(self) -> None:
        for node in (self.a, self.b):
            await node.serve_stream("echo", echo_stream)
            await node.serve_stream("hang", self._hang)
            await node.serve("wait", self._wait)

    async def cut(self) -> None:
        """Reset every connection in mid-transfer; later ones are let through."""
        assert self.proxy.num_open
        before = self.proxy.num_connections
        self.proxy.cut()
        self.proxy.restore()

        async def is_back() -> bool:
            return self.proxy.num_connections > before and self.proxy.num_open > 0

        await eventually(is_back)

    def swallow(self) -> int:
        """Silently drop everything on open connections, as when a NAT forgets them.

        Return the number of connections until now.
        """
        assert self.proxy.num_open
        for pipe in self.proxy._pipes():
            pipe.hold()
        return self.proxy.num_connections

    async def until_running(self, number: int) -> None:
        """Wait until `num` handlers of "hang" run."""

        async def is_so() -> bool:
            return self.num_running == number

        await eventually(is_so)

    async def until_tidy(self) -> None:
        """Wait until neither host keeps anything for a stream."""

        async def is_tidy() -> bool:
            return all(
                not node._watch._streams
                and not node._methods.resumable._accepted
                and not node._methods.resumable._num_held
                and not node._methods.resumable._opened
                and node._host.unacknowledged.num_bytes == node._host.unread.num_bytes == 0
                for node in (self.a, self.b)
            )

        await eventually(is_tidy)

    async def _hang(self, _peer_id: str, _stream: Stream) -> None:
        self.num_running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_running -= 1

    async def _wait(self, _peer_id: str, request: bytes) -> bytes:
        self.asked.set()
        await self.may_answer.wait()
        return request


def num_tasks() -> int:
    """Return how many tasks there are besides those of proxies, which have some for each connection."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return sum(not name.startswith(("WanProxy.", "_Direction.")) for name in names)


PairCase = Callable[[Pair], Coroutine[Any, Any, None]]
PairRun = Callable[[PairCase], None]


@asynccontextmanager
async def proxied_pair(folder: Path) -> AsyncIterator[Pair]:
    port = free_port()
    async with WanProxy(target=("127.0.0.1", port), connection=LINKS["lan"]) as proxy:
        announced = f"/ip4/127.0.0.1/tcp/{proxy.address[1]}"
        listen = (f"/ip4/127.0.0.1/tcp/{port}",)
        async with (
            await libp2p_node(folder / "a", listen=listen, announce=(announced,)) as a,
            await libp2p_node(folder / "b", listen=(), peers=(f"{announced}/p2p/{a.peer_id}",)) as b,
        ):
            pair = Pair(a, b, proxy)
            await pair.serve()
            yield pair


@contextmanager
def pair_runner(folder: Path) -> Iterator[PairRun]:
    """Share one event loop and two hosts between many cases, none of which may leave anything behind."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        context = proxied_pair(folder)
        pair = runner.run(context.__aenter__())

        async def main(case: PairCase) -> None:
            before = num_tasks()
            await case(pair)
            await pair.until_tidy()

            async def has_only_its_own_tasks() -> bool:
                return num_tasks() <= before

            await eventually(has_only_its_own_tasks)

        yield lambda case: runner.run(main(case))
        runner.run(context.__aexit__(None, None, None))
