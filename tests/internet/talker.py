"""The role of a node that does what a test tells it: calls, streams and answers, with the time of each step.

`swarm-node join --take nothing` runs it in the place of its own role (see `lab_nodes`), so that everything below a role
is what users run. A connection to the socket `talk.sock` in the node's home carries one command as a JSON line. JSON
lines come back: progress, then the result, which has `done`, or `error`. A command whose test has finished sending ends
early. Times are of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from internet import namespaces
from swarm.client import AsyncClient
from swarm.network.interface import EndOfStream, Stream
from swarm.serving.session.session import Session
from swarm.serving.session.trace import Trace
from swarm_node.node import Node
from swarm_node.roles import helper
from swarm_protocol.errors import SwarmError
from swarm_protocol.session_frames import TokenDraw

SOCKET = "talk.sock"
ECHO, POUR = "lab.echo", "lab.pour"
POURED_BYTES = 2**18
TIMEOUT_S = 60.0
"""The limit of a stream's steps. Tests have shorter deadlines."""

Say = Callable[..., None]


@dataclass(slots=True)
class Times:
    """Record when something was done, as results report it. `longest_s` is the longest pause between two times."""

    num: int = 0
    began_at: float = field(default_factory=time.monotonic)
    first_s: float = 0.0
    last_at: float = 0.0
    longest_s: float = 0.0

    def note(self) -> None:
        """Note that another one was done now."""
        now = time.monotonic()
        since = self.last_at or self.began_at
        self.first_s = self.first_s or now - self.began_at
        if self.num:
            self.longest_s = max(self.longest_s, now - since)
        self.num, self.last_at = self.num + 1, now


class TalkerRole(helper.StandbyRole):
    async def run(self, node: Node) -> None:
        await node.network.serve(ECHO, _echo)
        await node.network.serve_stream(ECHO, _echo_all)
        await node.network.serve_stream(POUR, _pour)
        async with await asyncio.start_unix_server(partial(_converse, node), node.home.path / SOCKET):
            await super().run(node)


def begin(namespace: str) -> None:
    """Become a process in `namespace`, in which nodes started with `--take nothing` are talkers."""
    namespaces.enter(namespace)
    helper.StandbyRole = TalkerRole  # type: ignore[misc]


async def _echo(_peer_id: str, request: bytes) -> bytes:
    return request


async def _echo_all(_peer_id: str, stream: Stream) -> None:
    with contextlib.suppress(EndOfStream):
        while True:
            await stream.send(await stream.receive())


async def _pour(_peer_id: str, stream: Stream) -> None:
    for number in range(int(await stream.receive())):
        await stream.send(number.to_bytes(4, "big") + bytes(POURED_BYTES))


async def _converse(node: Node, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    def say(**said: object) -> None:
        writer.write(json.dumps(said).encode() + b"\n")

    is_over = asyncio.Event()

    async def hear_end() -> None:
        await reader.read()
        is_over.set()

    command: dict[str, Any] = json.loads(await reader.readline())
    hearing = asyncio.create_task(hear_end())
    try:
        say(done=await COMMANDS[command.pop("command")](node, say, is_over, **command))
    except Exception as error:  # the test fails with this error
        say(error=repr(error))
    finally:
        hearing.cancel()
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()


async def _call(
    node: Node, _say: Say, is_over: asyncio.Event, *, peer: str, num: int, pause_s: float, num_bytes: int
) -> object:
    """Call a peer up to `num` times. `failures` are the calls that were not answered within 5 s."""
    times, failures = Times(), list[str]()
    for index in range(num):
        request = index.to_bytes(4, "big") + bytes(num_bytes)
        try:
            assert await node.network.call(peer, ECHO, request, timeout_s=5) == request
            times.note()
        except SwarmError as error:
            failures.append(error.message)
        if is_over.is_set():
            break
        await asyncio.sleep(pause_s)
    return asdict(times) | {"failures": failures}


async def _talk(
    node: Node, say: Say, is_over: asyncio.Event, *, peer: str, seconds: float, pause_s: float, num_bytes: int
) -> object:
    """Send messages on one stream for `seconds` and compare each with its echo, one at a time."""
    times = Times()
    async with node.network.stream(peer, ECHO, timeout_s=TIMEOUT_S) as stream:
        while time.monotonic() < times.began_at + seconds and not is_over.is_set():
            message = times.num.to_bytes(8, "big") + bytes(num_bytes)
            await stream.send(message)
            assert await stream.receive() == message, "a byte was lost"
            times.note()
            if times.num == 1:
                say(first_s=times.first_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await is_over.wait()
    return asdict(times)


async def _drink(node: Node, say: Say, _is_over: asyncio.Event, *, peer: str, num: int) -> object:
    """Receive `num` messages of 256 KiB that the peer sends as fast as it can."""
    times = Times()
    async with node.network.stream(peer, POUR, timeout_s=TIMEOUT_S) as stream:
        await stream.send(str(num).encode())
        for number in range(num):
            message = await stream.receive()
            assert message == number.to_bytes(4, "big") + bytes(POURED_BYTES), "a byte was lost"
            times.note()
            if number % 16 == 0:
                say(num=times.num)
    return asdict(times)


class PacedClient(AsyncClient):
    """Request each token once the last one was taken. Servers that draw ahead could otherwise finish the answer before
    the test causes a fault."""

    async def draw(self, model: str, prompt: Sequence[int], num_tokens: int, trace: Trace) -> AsyncIterator[int]:
        chosen = await self._catalog.to_use(model)
        shape = (await self._assets.get(chosen.name, chosen.revision.servers, chosen.published)).shape
        max_tokens = len(prompt) + num_tokens
        async with Session(
            self._state,
            shape,
            max_tokens=max_tokens,
            servers=chosen.revision.servers,
            trace=trace,
            options=self._session,
        ) as session:
            for index in range(num_tokens):
                drawn = await session.next_token(prompt, TokenDraw(index=index))
                prompt = [drawn.token_id]
                yield drawn.token_id


async def _ask(
    node: Node, say: Say, is_over: asyncio.Event, *, model: str, prompt: list[int], num_tokens: int, pause_s: float
) -> object:
    """Generate a greedy answer with a pause after each token. Each token is reported with the servers in use."""
    times, tokens, trace = Times(), list[int](), Trace(model=model)
    client = PacedClient(network=node.network, membership=node.membership)
    try:
        async with contextlib.aclosing(client.draw(model, prompt, num_tokens, trace)) as answer:
            async for token in answer:
                tokens.append(token)
                times.note()
                say(num=times.num, servers=[hop["peer_id"] for hop in trace.to_dict()["hops"]])
                if is_over.is_set():
                    break
                await asyncio.sleep(pause_s)
    finally:
        await client.aclose()
    return asdict(times) | {"tokens": tokens, "num_replays": len(trace.to_dict()["replays"])}


async def _servers(node: Node, _say: Say, _is_over: asyncio.Event, *, model: str) -> object:
    """Return the peers that serve a model, as this node sees them."""
    client = AsyncClient(network=node.network, membership=node.membership)
    try:
        return sorted(await client.servers(model))
    finally:
        await client.aclose()


async def _addrs(node: Node, _say: Say, _is_over: asyncio.Event) -> object:
    """Return the addresses that this node announces."""
    return await node.network.addrs()


COMMANDS: dict[str, Callable[..., Awaitable[object]]] = {
    "call": _call,
    "talk": _talk,
    "drink": _drink,
    "ask": _ask,
    "servers": _servers,
    "addrs": _addrs,
}
