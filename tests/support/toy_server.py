"""A server that speaks the real frames on a simulated internet and computes hashes in place of a model.

Unlike `toy_chain`, it has connections, pushes and records as on the real network, to test and time the client's side of
a session without a model. Rows are `raw` with two columns of whole numbers that fp32 holds exactly.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from support.plain_records import serve_record
from swarm.network.interface import Stream
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryNetwork
from swarm.serving.session.connection_pool import ConnectionPool
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection
from swarm_protocol.errors import PeerRefused, PeerViolation, SwarmError
from swarm_protocol.failure_messages import encode_failure
from swarm_protocol.rows import TOKENS, Rows
from swarm_protocol.session_frames import (
    SESSION_METHOD,
    AllowHandover,
    CloseSequence,
    Frame,
    LinkAck,
    LinkUpdate,
    OpenSequence,
    Push,
    SampledToken,
    SequenceEnded,
    SequenceReady,
    SequenceRef,
    ServerLeaving,
    StepRequest,
    StepResult,
    TokenDraw,
)

MODEL = "toy"
VOCAB = 1000
COLUMNS = 2

States = tuple[bytes, ...]


def run_blocks(states: States, x: bytes) -> tuple[States, bytes]:
    """Compute one position through blocks that each remember what came before.

    Return the new states and the output row.
    """
    new = []
    for state in states:
        digest = hashlib.blake2b(state + x, digest_size=6).digest()
        x = struct.pack("<2f", int.from_bytes(digest[:3], "little"), int.from_bytes(digest[3:], "little"))
        new.append(x)
    return tuple(new), x


def first_states(start: int, end: int) -> States:
    return tuple(bytes([block]) for block in range(start, end))


def logits_of(row: bytes) -> np.ndarray:
    logits = np.zeros(VOCAB, dtype="<f4")
    logits[int(struct.unpack("<2f", row)[0]) % VOCAB] = 1.0
    return logits


def expected_tokens(prompt: list[int], num_tokens: int, num_blocks: int) -> list[int]:
    """Return the answer of one undisturbed machine."""
    states, tokens, new = first_states(0, num_blocks), list[int](), prompt
    for _ in range(num_tokens):
        for token in new:
            states, row = run_blocks(states, struct.pack("<i", token))
        new = [int(logits_of(row).argmax())]
        tokens += new
    return tokens


@dataclass
class ToySequence:
    opened: OpenSequence
    connection: MultiplexedConnection
    states: list[States]
    previous: SequenceRef | None
    next: SequenceRef | None
    num_links: int = 0
    may_take: set[str] = field(default_factory=set)

    @property
    def length(self) -> int:
        return len(self.states) - 1


class ToyServer:
    """A server of blocks `[start, end)` of `num_blocks`.

    `spoil` may change a result before it is sent. `room_tokens` bounds a session, whatever the record announces.
    """

    def __init__(self, network: MemoryNetwork, membership: Membership, start: int, end: int, num_blocks: int) -> None:
        self.network = network
        self.start = start
        self.end = end
        self.num_blocks = num_blocks
        self.sequences: dict[tuple[str, bytes], ToySequence] = {}
        self.num_rows = 0
        self.num_steps = 0
        self.spoil: Callable[[StepResult], StepResult | None] = lambda result: result
        self.others: dict[str, ToyServer] = {}
        self.hand_over_s = 0.05
        self.pages: list[States] = []
        self.is_leaving = False
        self.room_tokens = 10_000
        self._membership = membership
        self._connections = ConnectionPool(network)
        self._tasks: set[asyncio.Task[None]] = set()
        self._queues: dict[str, asyncio.Queue[tuple[ToySequence, Push]]] = {}

    async def start_serving(self) -> None:
        await self.network.serve_stream(f"{SESSION_METHOD}/{MODEL}", self._serve)
        self.announce()

    def announce(self) -> None:
        self._membership.announce(
            serve_record(
                self.start,
                self.end,
                model=MODEL,
                revision="r",
                num_blocks=self.num_blocks,
                state="draining" if self.is_leaving else "serving",
                prefill_ms_per_token=0.1,
                decode_ms_per_block=0.1,
                free_kv_tokens=10_000,
            )
        )

    def leave(self) -> None:
        self.is_leaving = True
        self.announce()
        for connection in {
            id(sequence.connection): sequence.connection for sequence in self.sequences.values()
        }.values():
            connection.send(ServerLeaving(within_s=30.0))

    def evict(self) -> None:
        for (peer_id, sequence_id), sequence in list(self.sequences.items()):
            self._end(
                peer_id, sequence_id, sequence.connection, PeerRefused("evicted", retry_after_s=1.0, lacks_room=True)
            )

    async def close(self) -> None:
        await self._connections.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, peer_id: str, stream: Stream) -> None:
        connection = MultiplexedConnection(stream, peer_id)
        try:
            await connection.run(partial(self._on_frame, peer_id, connection))
        finally:
            for key in [key for key, sequence in self.sequences.items() if sequence.connection is connection]:
                del self.sequences[key]

    def _on_frame(self, peer_id: str, connection: MultiplexedConnection, frame: Frame) -> None:
        match frame:
            case OpenSequence():
                self._open(peer_id, connection, frame)
            case StepRequest():
                self._step((peer_id, frame.sequence_id), frame, forward=frame.forward)
            case Push():
                sequence = self.sequences.get((frame.client_peer_id, frame.sequence_id))
                source = SequenceRef(peer_id=peer_id, sequence_id=frame.source_id)
                if sequence is not None and sequence.previous == source and frame.position <= sequence.length:
                    self._step((frame.client_peer_id, frame.sequence_id), frame, forward=True)
            case LinkUpdate() if sequence := self.sequences.get((peer_id, frame.sequence_id)):
                sequence.previous, sequence.next = frame.previous, frame.next
                sequence.num_links += 1
                connection.send(
                    LinkAck(sequence_id=frame.sequence_id, num_links=sequence.num_links, position=sequence.length)
                )
            case AllowHandover() if sequence := self.sequences.get((peer_id, frame.sequence_id)):
                sequence.may_take.add(frame.to_peer_id)
            case CloseSequence():
                self.sequences.pop((peer_id, frame.sequence_id), None)

    def _open(self, peer_id: str, connection: MultiplexedConnection, opened: OpenSequence) -> None:
        if self.is_leaving:
            self._end(peer_id, opened.sequence_id, connection, PeerRefused("the server is leaving"))
        elif opened.max_tokens > self.room_tokens:
            self._end(peer_id, opened.sequence_id, connection, PeerRefused("full", retry_after_s=5.0, lacks_room=True))
        elif opened.take_over is not None:
            task = asyncio.get_running_loop().create_task(self._take_over(peer_id, connection, opened))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._ready(peer_id, connection, opened, self.pages[: opened.may_skip // 16 * 16 + 1])

    async def _take_over(self, peer_id: str, connection: MultiplexedConnection, opened: OpenSequence) -> None:
        assert opened.take_over is not None
        await asyncio.sleep(self.hand_over_s)
        old = self.others.get(opened.take_over.peer_id)
        sequence = (
            old.sequences.get((peer_id, opened.take_over.sequence_id))
            if old is not None and old.network.is_up
            else None
        )
        if sequence is None or self.network.peer_id not in sequence.may_take:
            self._end(peer_id, opened.sequence_id, connection, PeerRefused("the sequence was not handed over"))
            return
        first = sequence.opened.start
        self._ready(
            peer_id, connection, opened, [s[opened.start - first : opened.end - first] for s in sequence.states]
        )

    def _ready(
        self, peer_id: str, connection: MultiplexedConnection, opened: OpenSequence, states: list[States]
    ) -> None:
        states = states or [first_states(opened.start, opened.end)]
        sequence = ToySequence(opened, connection, list(states), opened.previous, opened.next)
        self.sequences[peer_id, opened.sequence_id] = sequence
        if connection.error is None:
            connection.send(SequenceReady(sequence_id=opened.sequence_id, max_step_tokens=32, length=sequence.length))

    def _end(self, peer_id: str, sequence_id: bytes, connection: MultiplexedConnection, error: SwarmError) -> None:
        self.sequences.pop((peer_id, sequence_id), None)
        if connection.error is None:
            connection.send(SequenceEnded(sequence_id=sequence_id, failure=encode_failure(error)))

    def _step(self, key: tuple[str, bytes], step: StepRequest | Push, *, forward: bool) -> None:
        sequence = self.sequences.get(key)
        if sequence is None:
            return
        if step.position > sequence.length:
            self._end(*key, sequence.connection, PeerViolation("a gap"))
            return
        payload, size, num_known = bytes(step.rows.payload), step.rows.row_bytes, sequence.length - step.position
        new = [payload[i : i + size] for i in range(0, len(payload), size)][num_known:]
        if not new:
            return
        position, outputs = sequence.length, []
        for row in new:
            states, output = run_blocks(sequence.states[-1], row)
            sequence.states.append(states)
            outputs.append(output)
        self.num_rows += len(new)
        self.num_steps += 1
        if sequence.length // 16 > (len(self.pages) - 1) // 16:
            self.pages = sequence.states[: sequence.length // 16 * 16 + 1]
        self._reply(key, sequence, step, position, outputs, forward=forward)

    def _reply(
        self,
        key: tuple[str, bytes],
        sequence: ToySequence,
        step: StepRequest | Push,
        position: int,
        outputs: list[bytes],
        *,
        forward: bool,
    ) -> None:
        rows, token = None, None
        if sequence.opened.end < self.num_blocks:
            if forward:
                rows = Rows(codec="raw", num_rows=len(outputs), num_columns=COLUMNS, payload=b"".join(outputs))
        elif step.want == "token":
            token = SampledToken(token_id=int(logits_of(outputs[-1]).argmax()))
        result = self.spoil(
            StepResult(
                sequence_id=key[1],
                position=sequence.length,
                compute_ms=0.0,
                rows=rows,
                token=token,
                batch_size=1,
                looped=token is not None
                and step.draw is not None
                and step.draw.ahead > 0
                and sequence.next is not None,
                num_links=sequence.num_links,
            )
        )
        if result is None:
            return
        if forward and rows is not None and sequence.next is not None:
            push = Push(
                client_peer_id=key[0],
                sequence_id=sequence.next.sequence_id,
                position=position,
                want=step.want,
                draw=step.draw,
                rows=result.rows or rows,
                source_id=key[1],
            )
            self._push(sequence, sequence.next.peer_id, push)
        sequence.connection.send(result)
        if result.looped and result.token is not None:
            self._loop(key, sequence, step.draw, result.token.token_id)

    def _loop(self, key: tuple[str, bytes], sequence: ToySequence, draw: TokenDraw | None, token_id: int) -> None:
        assert draw is not None
        assert sequence.next is not None
        push = Push(
            client_peer_id=key[0],
            sequence_id=sequence.next.sequence_id,
            position=sequence.length,
            want="token",
            draw=replace(draw, index=draw.index + 1, ahead=draw.ahead - 1),
            rows=Rows(codec=TOKENS, num_rows=1, num_columns=0, payload=struct.pack("<i", token_id)),
            source_id=key[1],
        )
        if sequence.next.sequence_id == key[1]:
            asyncio.get_running_loop().call_soon(self._step_on, key, push)
        else:
            self._push(sequence, sequence.next.peer_id, push)

    def _step_on(self, key: tuple[str, bytes], push: Push) -> None:
        self._step(key, push, forward=True)

    def _push(self, sequence: ToySequence, peer_id: str, push: Push) -> None:
        if peer_id not in self._queues:
            self._queues[peer_id] = asyncio.Queue()
            task = asyncio.get_running_loop().create_task(self._push_all(peer_id, self._queues[peer_id]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._queues[peer_id].put_nowait((sequence, push))

    async def _push_all(self, peer_id: str, queue: asyncio.Queue[tuple[ToySequence, Push]]) -> None:
        while True:
            sequence, push = await queue.get()
            try:
                connection = await self._connections.get(peer_id, MODEL)
                # stays open, as a server's connections do
                connection.attach(b"", lambda _: None)
                connection.send(push)
            except SwarmError:
                if sequence.connection.error is None:
                    failed = StepResult(
                        sequence_id=sequence.opened.sequence_id,
                        position=sequence.length,
                        push_failed=True,
                        num_links=sequence.num_links,
                    )
                    sequence.connection.send(failed)
