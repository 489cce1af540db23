"""A server that speaks the real frames on a simulated internet and computes hashes in place of a model.

As `toy_chain`, but with lanes, pushes and records as on the real network: what it takes to test and time the client's
side of a session without a model. Rows are `raw` with two columns, whole numbers that fp32 holds exactly.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from swarm.network.interface import Stream
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryNetwork
from swarm.serving.session.connection_pool import ConnectionPool
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection
from swarm_protocol.errors import PeerRefused, PeerViolation, SwarmError
from swarm_protocol.failure_messages import encode_failure
from swarm_protocol.records import ServeRecord
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
    """One position through blocks that each remember what came before: the new states and the output row."""
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
    """What one undisturbed machine answers."""
    states, tokens, new = first_states(0, num_blocks), list[int](), prompt
    for _ in range(num_tokens):
        for token in new:
            states, row = run_blocks(states, struct.pack("<i", token))
        new = [int(logits_of(row).argmax())]
        tokens += new
    return tokens


@dataclass
class ToySeat:
    opened: OpenSequence
    lane: MultiplexedConnection
    states: list[States]
    previous: SequenceRef | None
    next: SequenceRef | None
    num_links: int = 0
    is_fresh: bool = True
    may_take: set[str] = field(default_factory=set)

    @property
    def length(self) -> int:
        return len(self.states) - 1


class ToyServer:
    """Blocks `[start, end)` of `num_blocks`. `spoil` may change a result before it is sent.

    `room_tokens` is what a session may have, whatever the record says.
    """

    def __init__(self, network: MemoryNetwork, membership: Membership, start: int, end: int, num_blocks: int) -> None:
        self.network = network
        self.start = start
        self.end = end
        self.num_blocks = num_blocks
        self.seats: dict[tuple[str, bytes], ToySeat] = {}
        self.num_rows = 0
        self.num_steps = 0
        self.spoil: Callable[[StepResult], StepResult | None] = lambda result: result
        self.others: dict[str, ToyServer] = {}
        self.hand_over_s = 0.05
        self.pages: list[States] = []
        self.is_leaving = False
        self.room_tokens = 10_000
        self._membership = membership
        self._lanes = ConnectionPool(network)
        self._tasks: set[asyncio.Task[None]] = set()
        self._queues: dict[str, asyncio.Queue[tuple[ToySeat, Push]]] = {}

    async def start_serving(self) -> None:
        await self.network.serve_stream(f"{SESSION_METHOD}/{MODEL}", self._serve)
        self.announce()

    def announce(self) -> None:
        self._membership.announce(
            ServeRecord(
                model=MODEL,
                revision="r",
                num_blocks=self.num_blocks,
                start=self.start,
                end=self.end,
                state="draining" if self.is_leaving else "serving",
                prefill_ms_per_token=0.1,
                decode_ms_per_block=0.1,
                free_kv_tokens=10_000,
                queue_depth=0,
            )
        )

    def leave(self) -> None:
        self.is_leaving = True
        self.announce()
        for lane in {id(seat.lane): seat.lane for seat in self.seats.values()}.values():
            lane.send(ServerLeaving(within_s=30.0))

    def evict(self) -> None:
        for (peer_id, sequence_id), seat in list(self.seats.items()):
            self._end(peer_id, sequence_id, seat.lane, PeerRefused("evicted", retry_after_s=1.0))

    async def close(self) -> None:
        await self._lanes.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, peer_id: str, stream: Stream) -> None:
        lane = MultiplexedConnection(stream, peer_id)
        try:
            await lane.run(partial(self._on_frame, peer_id, lane))
        finally:
            for key in [key for key, seat in self.seats.items() if seat.lane is lane]:
                del self.seats[key]

    def _on_frame(self, peer_id: str, lane: MultiplexedConnection, frame: Frame) -> None:
        match frame:
            case OpenSequence():
                self._open(peer_id, lane, frame)
            case StepRequest():
                self._step((peer_id, frame.sequence_id), frame, forward=frame.forward)
            case Push():
                seat = self.seats.get((frame.client_peer_id, frame.sequence_id))
                source = SequenceRef(peer_id=peer_id, sequence_id=frame.source_id)
                if seat is not None and seat.previous == source and frame.position <= seat.length:
                    self._step((frame.client_peer_id, frame.sequence_id), frame, forward=True)
            case LinkUpdate() if seat := self.seats.get((peer_id, frame.sequence_id)):
                seat.previous, seat.next = frame.previous, frame.next
                seat.num_links += 1
                lane.send(LinkAck(sequence_id=frame.sequence_id, num_links=seat.num_links, position=seat.length))
            case AllowHandover() if seat := self.seats.get((peer_id, frame.sequence_id)):
                seat.may_take.add(frame.to_peer_id)
            case CloseSequence():
                self.seats.pop((peer_id, frame.sequence_id), None)

    def _open(self, peer_id: str, lane: MultiplexedConnection, opened: OpenSequence) -> None:
        if self.is_leaving:
            self._end(peer_id, opened.sequence_id, lane, PeerRefused("the server is leaving"))
        elif opened.max_tokens > self.room_tokens:
            self._end(peer_id, opened.sequence_id, lane, PeerRefused("full", retry_after_s=5.0))
        elif opened.take_over is not None:
            task = asyncio.get_running_loop().create_task(self._take_over(peer_id, lane, opened))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._ready(peer_id, lane, opened, self.pages[: 16 * len(opened.page_keys) + 1])

    async def _take_over(self, peer_id: str, lane: MultiplexedConnection, opened: OpenSequence) -> None:
        assert opened.take_over is not None
        await asyncio.sleep(self.hand_over_s)
        old = self.others.get(opened.take_over.peer_id)
        seat = old.seats.get((peer_id, opened.take_over.sequence_id)) if old is not None and old.network.is_up else None
        if seat is None or self.network.peer_id not in seat.may_take:
            self._end(peer_id, opened.sequence_id, lane, PeerRefused("the seat was not handed over"))
            return
        first = seat.opened.start
        self._ready(peer_id, lane, opened, [s[opened.start - first : opened.end - first] for s in seat.states])

    def _ready(self, peer_id: str, lane: MultiplexedConnection, opened: OpenSequence, states: list[States]) -> None:
        states = states or [first_states(opened.start, opened.end)]
        seat = ToySeat(opened, lane, list(states), opened.previous, opened.next)
        self.seats[peer_id, opened.sequence_id] = seat
        if lane.error is None:
            lane.send(SequenceReady(sequence_id=opened.sequence_id, max_step_tokens=32, length=seat.length))

    def _end(self, peer_id: str, sequence_id: bytes, lane: MultiplexedConnection, error: SwarmError) -> None:
        self.seats.pop((peer_id, sequence_id), None)
        if lane.error is None:
            lane.send(SequenceEnded(sequence_id=sequence_id, failure=encode_failure(error)))

    def _step(self, key: tuple[str, bytes], step: StepRequest | Push, *, forward: bool) -> None:
        seat = self.seats.get(key)
        if seat is None:
            return
        if seat.is_fresh:
            del seat.states[step.position + 1 :]
            seat.is_fresh = False
        if step.position > seat.length:
            self._end(*key, seat.lane, PeerViolation("a gap"))
            return
        payload, size, num_known = bytes(step.rows.payload), step.rows.row_bytes, seat.length - step.position
        new = [payload[i : i + size] for i in range(0, len(payload), size)][num_known:]
        if not new:
            return
        position, outputs = seat.length, []
        for row in new:
            states, output = run_blocks(seat.states[-1], row)
            seat.states.append(states)
            outputs.append(output)
        self.num_rows += len(new)
        self.num_steps += 1
        if seat.length // 16 > (len(self.pages) - 1) // 16:
            self.pages = seat.states[: seat.length // 16 * 16 + 1]
        self._reply(key, seat, step, position, outputs, forward=forward)

    def _reply(
        self,
        key: tuple[str, bytes],
        seat: ToySeat,
        step: StepRequest | Push,
        position: int,
        outputs: list[bytes],
        *,
        forward: bool,
    ) -> None:
        rows, token = None, None
        if seat.opened.end < self.num_blocks:
            if forward:
                rows = Rows(codec="raw", num_rows=len(outputs), num_columns=COLUMNS, payload=b"".join(outputs))
        elif step.want == "token":
            token = SampledToken(token_id=int(logits_of(outputs[-1]).argmax()))
        elif step.want != "nothing":
            wanted = outputs if step.want == "all" else outputs[-1:]
            logits = b"".join(logits_of(output).tobytes() for output in wanted)
            rows = Rows(codec="raw", num_rows=len(wanted), num_columns=VOCAB, payload=logits)
        result = self.spoil(
            StepResult(
                sequence_id=key[1],
                position=seat.length,
                compute_ms=0.0,
                rows=rows,
                token=token,
                batch_size=1,
                looped=token is not None and step.draw is not None and step.draw.ahead > 0 and seat.next is not None,
                num_links=seat.num_links,
            )
        )
        if result is None:
            return
        if forward and rows is not None and seat.next is not None:
            assert result.rows is not None
            push = Push(
                client_peer_id=key[0],
                sequence_id=seat.next.sequence_id,
                position=position,
                want=step.want,
                draw=step.draw,
                rows=result.rows,
                source_id=key[1],
            )
            self._push(seat, seat.next.peer_id, push)
        seat.lane.send(result)
        if result.looped and result.token is not None:
            self._loop(key, seat, step.draw, result.token.token_id)

    def _loop(self, key: tuple[str, bytes], seat: ToySeat, draw: TokenDraw | None, token_id: int) -> None:
        assert draw is not None
        assert seat.next is not None
        push = Push(
            client_peer_id=key[0],
            sequence_id=seat.next.sequence_id,
            position=seat.length,
            want="token",
            draw=replace(draw, index=draw.index + 1, ahead=draw.ahead - 1),
            rows=Rows(codec=TOKENS, num_rows=1, num_columns=0, payload=struct.pack("<i", token_id)),
            source_id=key[1],
        )
        if seat.next.sequence_id == key[1]:
            asyncio.get_running_loop().call_soon(self._step_on, key, push)
        else:
            self._push(seat, seat.next.peer_id, push)

    def _step_on(self, key: tuple[str, bytes], push: Push) -> None:
        self._step(key, push, forward=True)

    def _push(self, seat: ToySeat, peer_id: str, push: Push) -> None:
        if peer_id not in self._queues:
            self._queues[peer_id] = asyncio.Queue()
            task = asyncio.get_running_loop().create_task(self._push_all(peer_id, self._queues[peer_id]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._queues[peer_id].put_nowait((seat, push))

    async def _push_all(self, peer_id: str, queue: asyncio.Queue[tuple[ToySeat, Push]]) -> None:
        while True:
            seat, push = await queue.get()
            try:
                lane = await self._lanes.get(peer_id, MODEL)
                # kept open, as a server's lanes are
                lane.attach(b"", lambda _: None)
                lane.send(push)
            except SwarmError:
                if seat.lane.error is None:
                    failed = StepResult(
                        sequence_id=seat.opened.sequence_id,
                        position=seat.length,
                        push_failed=True,
                        num_links=seat.num_links,
                    )
                    seat.lane.send(failed)
