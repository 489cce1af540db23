"""Servers of arithmetic spans on a simulated internet, and a client that writes every frame itself.

They test how servers handle valid and invalid frames, without a model and without the real client's logic. At the end
everything that servers lend must be free: sessions, pages, waiting bytes, tasks.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from support.arithmetic_span import NUM_BLOCKS, NUM_PAGES, REVISION, Sums, rows_of, sums_of
from support.faults import Fault, FaultScript
from support.leaks import no_leaks
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.serving.engine.span_speed import SpanSpeed
from swarm.serving.grammar.grammar_masks import GrammarPool
from swarm.serving.peer_shares import Sharer
from swarm.serving.server.connection_server import ConnectionServer
from swarm.serving.server.deployment import Deployment, LoadedSpan, ServerOptions
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection, open_stream
from swarm.testing import virtual_time
from swarm_compression import get_row_codec
from swarm_protocol.errors import PeerRefused
from swarm_protocol.rows import Rows
from swarm_protocol.serving_messages import KV_METHOD
from swarm_protocol.session_frames import (
    SESSION_METHOD,
    Frame,
    OpenSequence,
    RoomFreed,
    SequenceEnded,
    SequenceReady,
    SequenceRef,
    StepRequest,
    StepResult,
    TokenDraw,
)
from torch import Tensor

MODEL = "tiny"
COLUMNS = 4
MAX_STEP_TOKENS = 32
PICK = TokenDraw()

F = TypeVar("F", bound=Frame)


def sequence_id(number: int) -> bytes:
    return bytes([number]) * 16


def token_rows(*tokens: int) -> Rows:
    return Rows(codec="tokens", num_rows=len(tokens), num_columns=0, payload=np.array(tokens, "<i4").tobytes())


def hidden_rows(x_TH: Tensor, codec: str = "raw") -> Rows:
    num_rows, num_columns = x_TH.shape
    payload = get_row_codec(codec).encode(x_TH)
    return Rows(codec=codec, num_rows=num_rows, num_columns=num_columns, payload=payload)


def floats(rows: Rows | None) -> Tensor:
    assert rows is not None
    return get_row_codec(rows.codec).decode(rows.payload, rows.num_rows, rows.num_columns)


def through(tokens: Sequence[int], num_spans: int) -> Tensor:
    """Return the logits [T, V] that a chain of spans computes for all of `tokens`."""
    values = torch.tensor(tokens, dtype=torch.float32)
    for _ in range(num_spans - 1):
        values = rows_of(sums_of(values), False)[:, 0]
    return rows_of(sums_of(values), True)


class NoGrammars(GrammarPool):
    def check(self, _sharer: Sharer) -> None:
        raise PeerRefused("this server follows no grammars")


@dataclass
class Server:
    network: MemoryNetwork
    span: Sums
    options: ServerOptions
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    is_serving: bool = True

    def __post_init__(self) -> None:
        loaded = LoadedSpan(
            span=self.span,
            speed=SpanSpeed(prefill_ms=1e-3, decode_ms=1e-3, kv_bytes_per_token=1),
            kv_tokens=0,
            max_step_tokens=MAX_STEP_TOKENS,
            revision=REVISION,
            source="",
            files=b"",
        )
        self.deployed = Deployment(loaded, self.span.pool(), self.options, ThreadPoolExecutor(1))
        self.engine = self.deployed.engine
        self.connections = ConnectionServer(
            self.network, MODEL, self.options, offer=self.offer, on_changed=lambda: None, grammars=NoGrammars(Path())
        )

    @property
    def peer_id(self) -> str:
        return self.network.peer_id

    def offer(self) -> Deployment:
        if not self.is_serving:
            raise PeerRefused("the server takes no new sessions")
        return self.deployed

    async def start(self) -> None:
        await self.network.serve_stream(f"{SESSION_METHOD}/{MODEL}", self.connections.serve)
        await self.network.serve_stream(f"{KV_METHOD}/{MODEL}", self.connections.serve_kv)
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(work()) for work in (self.engine.run, self.connections.run)]

    async def freed(self) -> None:
        """Wait until the server has nothing in use."""
        async with asyncio.timeout(30):
            while self.connections.sessions or self.engine.num_sequences or self.engine.num_waiting:
                await asyncio.sleep(0.01)
        assert self.engine.pages.num_free == NUM_PAGES
        assert self.connections.backpressure.num_bytes == 0

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        self.engine.close(wait=True)
        await self.network.close()


class Talk:
    """A client's connection to one server. `heard` has the frames that arrived and were not awaited yet, and `num_told`
    counts those that say that there may be room."""

    def __init__(self, connection: MultiplexedConnection, blank: OpenSequence) -> None:
        """Keep `blank`, the opening that each call of `open` changes."""
        self.connection = connection
        self.blank = blank
        self.heard: list[Frame] = []
        self.num_told = 0
        self._news = asyncio.Event()

    async def __aenter__(self) -> Talk:
        self._running = asyncio.create_task(self.connection.run(self._take))
        self._running.add_done_callback(lambda _: self._news.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.wait({self._running})

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, RoomFreed):
            self.num_told += 1
            return
        self.heard.append(frame)
        self._news.set()

    async def next(self, kind: type[F]) -> F:
        """Return the next frame, which must be of this kind."""
        async with asyncio.timeout(300):
            while not self.heard:
                if self.connection.error is not None:
                    raise self.connection.error
                self._news.clear()
                await self._news.wait()
        frame = self.heard.pop(0)
        assert isinstance(frame, kind), frame
        return frame

    async def open(self, number: int = 1, **changes: Any) -> SequenceReady:
        self.connection.send(dataclasses.replace(self.blank, sequence_id=sequence_id(number), **changes))
        return await self.next(SequenceReady)

    async def refused(self, number: int = 1, **changes: Any) -> Exception:
        self.connection.send(dataclasses.replace(self.blank, sequence_id=sequence_id(number), **changes))
        return (await self.next(SequenceEnded)).error("")

    async def step(
        self, rows: Rows, position: int, number: int = 1, want: str = "nothing", **changes: Any
    ) -> StepResult:
        self.send_step(rows, position, number, want, **changes)
        return await self.next(StepResult)

    def send_step(self, rows: Rows, position: int, number: int = 1, want: str = "nothing", **changes: Any) -> None:
        pick = PICK if want == "token" else None
        step = StepRequest(sequence_id=sequence_id(number), position=position, want=want, draw=pick, rows=rows)
        self.connection.send(dataclasses.replace(step, **changes))


def opening(server: Server, number: int = 1, **changes: Any) -> OpenSequence:
    opened = OpenSequence(
        sequence_id=sequence_id(number),
        session_id="s",
        revision=REVISION,
        start=server.span.start,
        end=server.span.end,
        max_tokens=64,
    )
    return dataclasses.replace(opened, **changes)


class World:
    """Servers in the order of their spans, called s0, s1, … in fault scripts, and `client`, the peer that uses them."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.internet = MemoryInternet(detection_s=0.0)
        self.servers: list[Server] = []
        self.script = FaultScript(faults, kill=self.kill)
        self.client = self.internet.network()
        self.running = AsyncExitStack()
        self.talks = AsyncExitStack()

    def kill(self, who: str) -> None:
        self.internet.crash(self.servers[int(who[1:])].peer_id)

    async def add(self, start: int, end: int, **options: Any) -> Server:
        allowed = ServerOptions(
            max_step_ms=1e9, max_alone_ms=1e9, failpoints=self.script.hook(f"s{len(self.servers)}"), **options
        )
        network, span = self.internet.network(), Sums(start=start, end=end)
        server = Server(network, span, allowed)
        await server.start()
        self.running.push_async_callback(server.close)
        self.servers.append(server)
        return server

    async def talk(self, server: Server | int = 0, client: MemoryNetwork | None = None) -> Talk:
        """Open a separate connection."""
        server = self.servers[server] if isinstance(server, int) else server
        stream = await self.talks.enter_async_context(open_stream(client or self.client, server.peer_id, MODEL))
        talk = Talk(MultiplexedConnection(stream, server.peer_id), opening(server))
        return await self.talks.enter_async_context(talk)

    async def chain(self, number: int = 1, **changes: Any) -> list[Talk]:
        """Open a connection to each server, with linked sessions."""
        talks = [await self.talk(index) for index in range(len(self.servers))]
        for index, talk in enumerate(talks):
            await talk.open(number, **{**self.neighbours(index, number), **changes})
        return talks

    def neighbours(self, index: int, number: int = 1) -> dict[str, Any]:
        previous = (
            SequenceRef(peer_id=self.servers[index - 1].peer_id, sequence_id=sequence_id(number)) if index else None
        )
        following = self.servers[index + 1 : index + 2]
        to = SequenceRef(peer_id=following[0].peer_id, sequence_id=sequence_id(number)) if following else None
        return {"previous": previous, "next": to}


def with_servers(
    work: Callable[[World], Awaitable[None]],
    spans: Sequence[tuple[int, int]] = ((0, NUM_BLOCKS),),
    *,
    faults: Sequence[Fault] = (),
    dead: Sequence[int] = (),
    **options: Any,
) -> None:
    """Run `work` beside servers, end all connections, and check what is left at all servers except dead ones."""

    async def run() -> None:
        world = World(faults)
        async with world.running:
            for start, end in spans:
                await world.add(start, end, **options)
            async with world.talks:
                await work(world)
            for index, server in enumerate(world.servers):
                if index not in dead:
                    await server.freed()
        await world.client.close()
        world.script.assert_all_fired()

    with no_leaks():
        virtual_time.run(run(), compute_s=lambda function: 0.001)
