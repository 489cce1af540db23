"""The server's side of lanes: who may open seats, and which frame is for which seat.

A seat belongs to the lane that opened it and ends with it. Its id counts together with the client's peer id, which the
network vouches for, so nobody reaches another's seat. Lanes are bounded in number: those that hold nothing and say
nothing are ended, and make room for others at once when there are too many. `run` owns what looks after all of it;
each lane is owned by the network's handler task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, get_args

from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.failure_messages import encode_failure
from swarm_protocol.serving_messages import KvRequest
from swarm_protocol.session_frames import (
    AllowHandover,
    AnswerTokens,
    CloseSequence,
    Frame,
    LinkUpdate,
    OpenSequence,
    Push,
    SequenceEnded,
    SequenceRef,
    ServerLeaving,
    StepRequest,
)

from swarm.network.interface import EndOfStream, Network, Stream
from swarm.serving.engine.engine import Engine
from swarm.serving.grammar.grammar_masks import GrammarPool
from swarm.serving.server.backpressure import Backpressure
from swarm.serving.server.forwarder import Forwarder
from swarm.serving.server.handover import hand_over, take_over
from swarm.serving.server.result_batcher import FlushTimer
from swarm.serving.server.server_options import ServerOptions
from swarm.serving.server.server_session import ModelSizes, ServerSession, SharedServices, refuse_push
from swarm.serving.server.session_sampler import SessionSampler
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection

logger = logging.getLogger(__name__)

MAX_LANES_PER_PEER = 8
"""A client needs one, and a server that pushes another; more are those that it has given up and we have not yet."""

SILENT_S = 10.0
"""What a new lane gets to say something."""

IDLE_LANE_S = 120.0
"""What a lane gets that holds no seat."""

SWEEP_S = 1.0

REQUEST_S = 10.0
"""What a stream for a hand-over gets to say what it wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSpan:
    """What is served now; without `grammars` no session may have one."""

    engine: Engine
    revision: str
    max_step_tokens: int
    grammars: GrammarPool | None = None


@dataclass(slots=True, eq=False)
class _Connection:
    """`heard_s` is of the loop's clock; None before the first frame."""

    lane: MultiplexedConnection
    tasks: asyncio.TaskGroup
    since_s: float
    heard_s: float | None = None
    seats: set[ServerSession] = field(default_factory=set)

    @property
    def last_s(self) -> float:
        return self.since_s if self.heard_s is None else self.heard_s


Refusal = Literal["busy", "never", "violation", "lanes"]
"""Why a seat was not opened: not now, not here at all, against the rules; or not even a lane."""


class ConnectionServer:
    """`offer` gives what new seats are opened on, or raises PeerRefused; `on_changed` hears of each opened or ended.

    `num_refused` counts by reason what was not opened.
    """

    def __init__(
        self,
        network: Network,
        model: str,
        options: ServerOptions,
        *,
        offer: Callable[[], ServedSpan],
        on_changed: Callable[[], None],
    ) -> None:
        self.seats: dict[tuple[str, bytes], ServerSession] = {}
        self.pushes = Forwarder(network, model)
        self.backlog = Backpressure(options.max_backlog_bytes)
        self._around = SharedServices(
            pushes=self.pushes, backlog=self.backlog, ticks=FlushTimer(), faults=options.faults
        )
        self.num_refused: dict[Refusal, int] = dict.fromkeys(get_args(Refusal), 0)
        self._network = network
        self._model = model
        self._options = options
        self._offer = offer
        self._on_changed = on_changed
        self._connections: set[_Connection] = set()
        self._num_lanes: Counter[str] = Counter()

    @property
    def num_lanes(self) -> int:
        return len(self._connections)

    async def run(self) -> None:
        """Until cancelled. Every lane ends then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.pushes.run(), name="pushes")
                tasks.create_task(self._sweep(), name="end what is idle")
        finally:
            for connection in self._connections:
                connection.lane.end()

    # --- handlers ---------------------------------------------------------------------------------------------------

    async def serve(self, peer_id: str, stream: Stream) -> None:
        """A lane. Raises PeerRefused where there are too many, and what was wrong with what the peer said."""
        try:
            self._check_lanes(peer_id)
        except PeerRefused:
            self.num_refused["lanes"] += 1
            raise
        lane = MultiplexedConnection(stream, peer_id)
        self._num_lanes[peer_id] += 1
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._run_lane(_Connection(lane, tasks, asyncio.get_running_loop().time()))
        finally:
            self._num_lanes[peer_id] -= 1
            if not self._num_lanes[peer_id]:
                del self._num_lanes[peer_id]
        if isinstance(lane.error, PeerViolation | PeerTimeout | PeerRefused):
            raise lane.error

    def _check_lanes(self, peer_id: str) -> None:
        if self._num_lanes[peer_id] >= MAX_LANES_PER_PEER:
            raise _too_many_lanes("use those you have")
        if self.num_lanes >= self._options.max_lanes:
            self._make_room()

    def _make_room(self) -> None:
        """End a lane that holds nothing: of the peer that has most, the one that was silent longest.

        Raises PeerRefused if there is none.
        """
        unused = self._unused()
        if not unused:
            raise _too_many_lanes("ask another server, or later")
        ended = max(unused, key=lambda unused: (self._num_lanes[unused.lane.peer_id], -unused.last_s))
        ended.lane.fail(_too_many_lanes("open another when you need one"))
        self._connections.discard(ended)

    def _unused(self) -> list[_Connection]:
        """Those that no seat depends on."""
        pushing = {served.previous.peer_id for served in self.seats.values() if served.previous is not None}
        return [
            connection
            for connection in self._connections
            if not connection.seats and connection.lane.peer_id not in pushing
        ]

    async def _run_lane(self, connection: _Connection) -> None:
        self._connections.add(connection)
        try:
            peer_id = connection.lane.peer_id
            await connection.lane.run(lambda frame: self._hear(frame, connection), lambda: self.backlog.room(peer_id))
        finally:
            self._connections.discard(connection)
            for served in list(connection.seats):
                served.close()

    async def serve_kv(self, peer_id: str, stream: Stream) -> None:
        """A hand-over to `peer_id`. Raises PeerRefused."""
        try:
            async with asyncio.timeout(REQUEST_S):
                request = KvRequest.from_bytes(await stream.receive())
        except TimeoutError:
            raise PeerTimeout("nothing was asked for") from None
        except EndOfStream:
            return
        served = self.seats.get((request.client_peer_id, request.sequence_id))
        await hand_over(served, request, peer_id, stream, self._options.faults)

    # --- frames -----------------------------------------------------------------------------------------------------

    def _hear(self, frame: Frame, connection: _Connection) -> None:
        """Raises PeerViolation for what nobody may say to a server."""
        lane = connection.lane
        connection.heard_s = asyncio.get_running_loop().time()
        match frame:
            case Push():
                served = self.seats.get((frame.client_peer_id, frame.sequence_id))
                if served is None:
                    refuse_push(frame, lane, _no_seat())
                else:
                    served.take_push(frame, lane)
            case OpenSequence():
                self._open(frame, connection)
            case StepRequest() | LinkUpdate() | AllowHandover() | AnswerTokens() | CloseSequence():
                served = self.seats.get((lane.peer_id, frame.sequence_id))
                if served is not None:
                    _tell(served, frame)
                elif isinstance(frame, StepRequest):
                    lane.send(SequenceEnded(sequence_id=frame.sequence_id, failure=encode_failure(_no_seat())))
            case _:
                raise PeerViolation(f"nobody says {type(frame).__name__} to a server", peer_id=lane.peer_id)

    def _open(self, wanted: OpenSequence, connection: _Connection) -> None:
        lane = connection.lane
        key = lane.peer_id, wanted.sequence_id
        if key in self.seats:
            raise PeerViolation("a seat is opened twice", peer_id=lane.peer_id)
        try:
            served = self._admit(wanted, connection)
        except SwarmError as error:
            self.num_refused[_reason(error)] += 1
            lane.send(SequenceEnded(sequence_id=wanted.sequence_id, failure=encode_failure(error)))
            return
        self.seats[key] = served
        connection.seats.add(served)
        served.task = connection.tasks.create_task(self._run_seat(served, wanted), name="seat")
        if not _must_prepare(wanted):
            served.ready()
        self._on_changed()

    def _admit(self, wanted: OpenSequence, connection: _Connection) -> ServerSession:
        """Raises PeerRefused."""
        lane, offer = connection.lane, self._offer()
        if wanted.revision != offer.revision:
            raise PeerRefused(f"this server has revision {offer.revision}", remedy="look up its record")
        span = offer.engine.span
        if wanted.sampler is not None and wanted.end != span.num_blocks:
            raise PeerViolation("only the seat of the last block has a sampler", peer_id=lane.peer_id)
        seat = offer.engine.open(
            client=lane.peer_id,
            start=wanted.start,
            end=wanted.end,
            max_tokens=wanted.max_tokens,
            page_keys=() if wanted.take_over else wanted.page_keys,
        )
        try:
            sampler = SessionSampler(wanted.sampler, span.vocab_size, offer.grammars) if wanted.sampler else None
        except SwarmError:
            seat.close()
            raise
        shape = ModelSizes(
            num_blocks=span.num_blocks,
            hidden_size=span.hidden_size,
            vocab_size=span.vocab_size,
            max_step_tokens=offer.max_step_tokens,
        )

        def closed(served: ServerSession) -> None:
            del self.seats[lane.peer_id, wanted.sequence_id]
            connection.seats.discard(served)
            self._on_changed()

        return ServerSession(
            lane,
            wanted,
            seat,
            shape,
            self._around,
            sampler=sampler,
            on_closed=closed,
        )

    async def _run_seat(self, served: ServerSession, wanted: OpenSequence) -> None:
        if _must_prepare(wanted):
            try:
                await self._prepare(served, wanted)
            except SwarmError as error:
                served.end(error)
                return
            except BaseException:
                served.close()
                raise
            served.ready()
        await served.run()

    async def _prepare(self, served: ServerSession, wanted: OpenSequence) -> None:
        """Raises SwarmError."""
        if served.sampler is not None:
            await served.sampler.prepare()
        if wanted.take_over is not None:
            await self._take_over(served, wanted.take_over)

    async def _take_over(self, served: ServerSession, source: SequenceRef) -> None:
        """Raises SwarmError."""
        is_in_vain, dials = False, self.pushes.dials
        if not dials.begin(source.peer_id, served.client):
            raise PeerRefused("the server does not dial that peer now", remedy="run the session again")
        try:
            await take_over(self._network, self._model, source, served.client, served.seat)
        except (PeerUnreachable, PeerTimeout, PeerRefused):
            is_in_vain = True
            raise
        finally:
            dials.end(source.peer_id, served.client, rests=is_in_vain)

    # --- when seats must go -----------------------------------------------------------------------------------------

    def leave(self, seats: Collection[ServerSession], within_s: float) -> None:
        """Ask the clients of these seats to go elsewhere."""
        for served in seats:
            served.leave()
        for lane in {served.lane for served in seats if served.lane.error is None}:
            lane.send(ServerLeaving(within_s=within_s))

    def end(self, seats: Collection[ServerSession], error: SwarmError) -> None:
        """End these seats now, and tell why."""
        for served in list(seats):
            served.end(error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            # in a call of its own, so that no variable here keeps a session's memory until the next one
            self._end_idle()

    def _end_idle(self) -> None:
        """End what says nothing."""
        now_s = asyncio.get_running_loop().time()
        idle_s = self._options.idle_s
        silent = PeerRefused(f"the session was silent for {idle_s:g} s", remedy="open it again", retry_after_s=1.0)
        for served in list(self.seats.values()):
            if served.seat.is_idle and now_s - served.seat.idle_since_s >= idle_s:
                served.end(silent)
        for connection in self._unused():
            _end_if_idle(connection, now_s)


def _end_if_idle(connection: _Connection, now_s: float) -> None:
    if connection.heard_s is None:
        if now_s - connection.since_s >= SILENT_S:
            connection.lane.fail(PeerTimeout("nothing was asked for", peer_id=connection.lane.peer_id))
    elif now_s - connection.heard_s >= IDLE_LANE_S:
        connection.lane.end()


def _must_prepare(wanted: OpenSequence) -> bool:
    """Whether it takes time before the seat is ready."""
    return wanted.take_over is not None or (wanted.sampler is not None and wanted.sampler.grammar is not None)


def _tell(
    served: ServerSession, frame: StepRequest | LinkUpdate | AllowHandover | AnswerTokens | CloseSequence
) -> None:
    match frame:
        case StepRequest():
            served.take_step(frame)
        case LinkUpdate():
            served.link(frame)
        case AllowHandover():
            served.handed_to.append(frame.to_peer_id)
        case AnswerTokens():
            served.recall(frame)
        case CloseSequence():
            served.close()


def _reason(error: SwarmError) -> Refusal:
    if isinstance(error, PeerRefused):
        return "busy" if error.retry_after_s > 0 else "never"
    return "violation"


def _too_many_lanes(remedy: str) -> PeerRefused:
    return PeerRefused("too many lanes are open", remedy=remedy, retry_after_s=SILENT_S)


def _no_seat() -> PeerRefused:
    return PeerRefused("there is no such session here", remedy="open it again", retry_after_s=1.0)
