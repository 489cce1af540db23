"""A client's session with servers, written from docs/reference/protocol/sessions.md."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from google.protobuf.message import Message
from interop.libp2p_channel import peer_id_of
from interop.second_node import MessageStream, Node, refusal, unpack
from swarm_protocol.proto import records_pb2, session_pb2

Frame = session_pb2.Frame
ROW_BYTES = {
    "tokens": lambda columns: 4,
    "raw": lambda columns: 4 * columns,
    "bf16": lambda columns: 2 * columns,
    "int8": lambda columns: columns + 2 * -(-columns // 64),
}


def write_frame(payload: bytes = b"", **kind: Message) -> bytes:
    """Make a message of one frame, with the payload of its rows."""
    head = session_pb2.Frames(frames=[Frame(**kind)]).SerializeToString()
    return b"\1" + struct.pack("<I", len(head)) + head + payload


def read_frames(message: bytes) -> Iterator[tuple[str, Message, bytes]]:
    """Yield the kind and the body of each frame of a message, and the payload of its rows."""
    at = 5 + int.from_bytes(message[1:5], "little")
    for frame in session_pb2.Frames.FromString(message[5:at]).frames:
        kind = frame.WhichOneof("kind")
        body, size = getattr(frame, kind), 0
        if kind in ("step", "push", "result") and body.HasField("rows"):
            size = body.rows.num_rows * ROW_BYTES[body.rows.codec](body.rows.num_columns)
        yield kind, body, message[at : at + size]
        at += size


@dataclass(frozen=True)
class Server:
    peer_id: str
    revision: str
    num_blocks: int
    start: int
    end: int


async def find_servers(node: Node, model: str) -> list[Server]:
    servers = []
    for signer, envelope in (await node.find(f"serve/{model}")).items():
        record = unpack(records_pb2.ServeRecord, envelope.payload)
        if record.state == "serving":
            servers.append(Server(peer_id_of(signer), record.revision, record.num_blocks, record.start, record.end))
    return sorted(servers, key=lambda server: (server.start, server.end, server.peer_id))


class Lost(Exception):
    """A server has gone, or has ended its sequence. Its peer id is the first argument."""


@dataclass(eq=False)
class Hop:
    """The blocks that one server runs for the session."""

    server: Server
    start: int
    end: int
    stream: MessageStream
    sequence_id: bytes = field(default_factory=lambda: os.urandom(16))
    max_step_tokens: int = 0
    num_links: int = 0
    links_heard: int = 0

    def ref(self) -> Frame.SequenceRef:
        return Frame.SequenceRef(peer_id=self.server.peer_id, sequence_id=self.sequence_id)

    async def send(self, payload: bytes = b"", **kind) -> None:
        (body,) = kind.values()
        body.sequence_id = self.sequence_id
        await self.stream.send(write_frame(payload, **kind))


class Session:
    """Greedy generation over a chain of servers, each on a stream of its own."""

    def __init__(self, node: Node, model: str, max_tokens: int, codec: str = "raw"):
        self.node, self.model, self.max_tokens, self.codec = node, model, max_tokens, codec
        self.hops: list[Hop] = []
        self.inputs: list[list[bytes]] = []  # the replay buffer: of each hop its rows so far
        self.columns = 0
        self.tokens: dict[int, int] = {}  # by the number of positions that they follow
        self.events: asyncio.Queue = asyncio.Queue()
        self.replaced: list[str] = []
        self._tasks: list[asyncio.Task] = []

    async def open(self, chain: list[Server]) -> None:
        start = 0
        for server in chain:
            self.hops.append(await self._hop(server, start, server.end))
            self.inputs.append([])
            start = server.end
        for place in range(len(chain)):
            await self._open(place)
        await self._until(lambda: all(hop.max_step_tokens for hop in self.hops))

    async def step(self, tokens: list[int], index: int) -> int:
        """Run these tokens, and return the likeliest next one, whichever servers are lost meanwhile."""
        place, first = 0, len(self.inputs[0])
        self.inputs[0] += [struct.pack("<i", token) for token in tokens]
        total = len(self.inputs[0])
        while True:
            try:
                await self._feed(place, first, index)
                await self._until(lambda: total in self.tokens)
                return self.tokens[total]
            except Lost as lost:
                place, first = await self._replace(lost.args[0]), 0

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for hop in self.hops:
            await hop.send(close=Frame.CloseSequence())
            await hop.stream.close()

    async def _hop(self, server: Server, start: int, end: int) -> Hop:
        stream = await self.node.stream(server.peer_id, f"stream/serving.lane/{self.model}")
        hop = Hop(server, start, end, stream)
        self._tasks.append(asyncio.create_task(self._listen(hop)))
        return hop

    async def _open(self, place: int) -> None:
        hop = self.hops[place]
        room = Frame.OpenSequence(
            session_id="second",
            revision=hop.server.revision,
            start=hop.start,
            end=hop.end,
            max_tokens=self.max_tokens,
            codec=self.codec,
            **self._neighbours(place),
        )
        await hop.send(open=room)

    def _neighbours(self, place: int) -> dict[str, Frame.SequenceRef]:
        both = {"previous": place - 1, "next": place + 1}
        return {name: self.hops[other].ref() for name, other in both.items() if 0 <= other < len(self.hops)}

    async def _feed(self, place: int, first: int, index: int) -> None:
        """Send the rows from position `first` on, and want a token for the last one."""
        hop, rows = self.hops[place], self.inputs[place]
        for at in range(first, len(rows), hop.max_step_tokens):
            piece = rows[at : at + hop.max_step_tokens]
            codec, columns = (self.codec, self.columns) if place else ("tokens", 0)
            step = Frame.StepRequest(
                position=at,
                want="nothing",
                forward=place + 1 < len(self.hops),
                rows=Frame.Rows(codec=codec, num_rows=len(piece), num_columns=columns),
            )
            if at + len(piece) == len(rows):
                step.want = "token"
                step.draw.CopyFrom(Frame.TokenDraw(temperature=0, top_p=1, index=index))
            await hop.send(b"".join(piece), step=step)

    async def _replace(self, peer_id: str) -> int:
        """Put another server in the place of a lost one, and tell its neighbours. Return the place."""
        (place,) = [place for place, hop in enumerate(self.hops) if hop.server.peer_id == peer_id]
        old = self.hops[place]
        self.replaced.append(peer_id)
        if place:  # what the server before has sent, or is about to send
            await self._until(lambda: len(self.inputs[place]) == len(self.inputs[0]))
        for server in await find_servers(self.node, self.model):
            if server.start <= old.start and old.end <= server.end and server.peer_id not in self.replaced:
                break
        else:
            raise LookupError("No other server has these blocks.")
        self.hops[place] = await self._hop(server, old.start, old.end)
        await self._open(place)
        for other in {place - 1, place + 1} & set(range(len(self.hops))):
            await self.hops[other].send(link=Frame.LinkUpdate(**self._neighbours(other)))
            self.hops[other].num_links += 1
        await self._until(lambda: all(hop.max_step_tokens and hop.links_heard == hop.num_links for hop in self.hops))
        return place

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            hop, body, payload = await asyncio.wait_for(self.events.get(), 20)
            if hop not in self.hops:
                continue
            if isinstance(body, Exception):
                raise Lost(hop.server.peer_id, str(body))
            if isinstance(body, Frame.SequenceEnded):
                raise Lost(hop.server.peer_id, str(refusal(body.failure)))
            if isinstance(body, Frame.SequenceReady):
                hop.max_step_tokens = body.max_step_tokens
            elif isinstance(body, Frame.LinkAck):
                hop.links_heard = body.num_links
            elif isinstance(body, Frame.StepResult):
                self._keep(self.hops.index(hop), body, payload)

    def _keep(self, place: int, result: Frame.StepResult, payload: bytes) -> None:
        if result.HasField("token"):
            self.tokens[result.position] = result.token.token_id
        if result.HasField("rows") and place + 1 < len(self.hops):
            size, rows = len(payload) // result.rows.num_rows, self.inputs[place + 1]
            first = result.position - result.rows.num_rows
            self.columns = result.rows.num_columns
            rows += [payload[at : at + size] for at in range((len(rows) - first) * size, len(payload), size)]

    async def _listen(self, hop: Hop) -> None:
        try:
            while True:
                for _, body, payload in read_frames(await hop.stream.receive()):
                    self.events.put_nowait((hop, body, payload))
        except Exception as error:
            self.events.put_nowait((hop, error, b""))
