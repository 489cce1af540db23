"""Serves the connections of clients and other servers: admits sessions, and passes each frame to its session.

A session belongs to the connection that opened it and ends with it. A session is found by its id and the client's peer
id, which the network has authenticated, so no client reaches another's session. The number of connections is bounded: a
connection without a session is ended once it is idle, or at once if there are too many. `run` owns the server's own
tasks; each connection belongs to the network's handler task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.failure_messages import encode_failure
from swarm_protocol.serving_messages import KvRequest
from swarm_protocol.session_frames import (
    AllowHandover,
    AnswerTokens,
    CloseSequence,
    DraftText,
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
from swarm.network.peer_budgets import greediest
from swarm.serving.grammar.grammar_masks import GrammarPool
from swarm.serving.peer_shares import Sharer
from swarm.serving.server.answer_log import AnswerLog
from swarm.serving.server.deployment import Deployment, ServerOptions
from swarm.serving.server.handover import hand_over, take_over
from swarm.serving.server.push_connections import PushConnections
from swarm.serving.server.server_session import ServerSession, SharedServices, refuse_push
from swarm.serving.server.session_queues import Backpressure
from swarm.serving.server.session_sampler import SessionSampler
from swarm.serving.server.waiting_clients import WaitingClients
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection

logger = logging.getLogger(__name__)

MAX_CONNECTIONS_PER_PEER = 8
"""Maximum connections of one peer. A client needs one, and a server that pushes needs another; the peer has already
given up any further ones."""

IDLE_CONNECTION_S = 120.0
"""Seconds after which a silent connection without a session is ended."""

RETRY_AFTER_S = 10.0

SIGN_S = 10.0
"""Seconds for which the server signs an answer whose session it has ended: its client may be closing it already."""

MAX_ENDED = 64
"""Maximum ended sessions of all peers whose answers may still be signed."""

SWEEP_S = 1.0

REQUEST_S = 10.0
"""Seconds within which a hand-over stream must send its request."""

Refusal = Literal["busy", "never", "violation", "connections"]
"""The reasons for refusing a session: no room now, never possible here, a protocol violation, or too many
connections."""


@dataclass(slots=True, eq=False)
class _ConnectionState:
    """An open connection. `last_s` is the loop's time of its last frame, or of its opening."""

    connection: MultiplexedConnection
    tasks: asyncio.TaskGroup
    last_s: float


class ConnectionServer:
    """Serves the connections of one model. `offer` returns the deployment for new sessions, or raises PeerRefused.

    `on_changed` is called whenever a session opens or ends;
    `num_refused` counts refusals by reason.
    """

    def __init__(
        self,
        network: Network,
        model: str,
        options: ServerOptions,
        *,
        offer: Callable[[], Deployment],
        on_changed: Callable[[], None],
        grammars: GrammarPool,
    ) -> None:
        self.sessions: dict[tuple[str, bytes], ServerSession] = {}
        self.push_connections = PushConnections(network, model)
        self.backpressure = Backpressure(options.max_backlog_bytes)
        self._services = SharedServices(
            model=model,
            network=network,
            push_connections=self.push_connections,
            backpressure=self.backpressure,
            failpoints=options.failpoints,
        )
        self.num_refused: dict[Refusal, int] = dict.fromkeys(get_args(Refusal), 0)
        self._options = options
        self._offered = offer
        self._grammars = grammars
        self._on_changed = on_changed
        self._states: set[_ConnectionState] = set()
        self._waiting = WaitingClients(network.provider_of)
        self._ended: dict[tuple[str, bytes], tuple[float, AnswerLog]] = {}

    @property
    def num_connections(self) -> int:
        return len(self._states)

    async def run(self) -> None:
        """Run until cancelled, and then end every connection."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.push_connections.run(), name="push connections")
                tasks.create_task(self._sweep(), name="end what is idle")
        finally:
            for state in self._states:
                state.connection.end()

    async def serve(self, peer_id: str, stream: Stream) -> None:
        """Serve a connection. Raises PeerRefused if there are too many, and the error that ended the connection."""
        try:
            self._check_connections(peer_id)
        except PeerRefused:
            self.num_refused["connections"] += 1
            raise
        connection = MultiplexedConnection(stream, peer_id)
        async with asyncio.TaskGroup() as tasks:
            state = _ConnectionState(connection, tasks, asyncio.get_running_loop().time())
            self._states.add(state)
            try:
                await connection.run(
                    lambda frame: self._on_frame(frame, state), lambda: self.backpressure.room(peer_id)
                )
            finally:
                self._states.discard(state)
                self._waiting.left(connection)
                for session in [each for each in self.sessions.values() if each.connection is connection]:
                    session.close()
        if isinstance(connection.error, PeerViolation | PeerTimeout | PeerRefused):
            raise connection.error

    def _check_connections(self, peer_id: str) -> None:
        if sum(state.connection.peer_id == peer_id for state in self._states) >= MAX_CONNECTIONS_PER_PEER:
            raise _too_many_connections("use those you have")
        if self.num_connections >= self._options.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        """End a connection without a session: of those, the `greediest` peer loses the one that was silent longest.

        Raises PeerRefused if there is none.
        """
        unused = sorted(self._unused(), key=lambda state: state.last_s)
        if not unused:
            raise _too_many_connections("ask another server, or later")
        num_unused = Counter(state.connection.peer_id for state in unused)
        greedy = greediest(num_unused, self._services.network.provider_of)
        ended = next(state for state in unused if state.connection.peer_id == greedy)
        ended.connection.fail(_too_many_connections("open another when you need one"))
        self._states.discard(ended)

    def _unused(self) -> list[_ConnectionState]:
        """Return the connections that no session depends on."""
        sessions = self.sessions.values()
        used = {session.connection for session in sessions}
        pushing = {session.previous.peer_id for session in sessions if session.previous is not None}
        return [
            state for state in self._states if state.connection not in used and state.connection.peer_id not in pushing
        ]

    async def serve_kv(self, peer_id: str, stream: Stream) -> None:
        """Serve a hand-over to `peer_id`. Raises PeerRefused."""
        try:
            async with asyncio.timeout(REQUEST_S):
                request = KvRequest.from_bytes(await stream.receive())
        except TimeoutError:
            raise PeerTimeout("nothing was asked for") from None
        except EndOfStream:
            return
        session = self.sessions.get((request.client_peer_id, request.sequence_id))
        await hand_over(session, request, peer_id, stream, self._options.failpoints)

    def _on_frame(self, frame: Frame, state: _ConnectionState) -> None:
        """Pass a frame to its session. Raises PeerViolation for a frame that no peer may send to a server."""
        connection = state.connection
        state.last_s = asyncio.get_running_loop().time()
        match frame:
            case Push():
                session = self.sessions.get((frame.client_peer_id, frame.sequence_id))
                if session is None:
                    refuse_push(frame, connection, _no_session())
                else:
                    session.take_push(frame, connection)
            case OpenSequence():
                self._open(frame, state)
            case StepRequest() | LinkUpdate() | AllowHandover() | AnswerTokens() | DraftText() | CloseSequence():
                session = self.sessions.get((connection.peer_id, frame.sequence_id))
                if session is not None:
                    _deliver(session, frame)
                elif isinstance(frame, CloseSequence):
                    self._sign_ended(frame, connection)
                elif isinstance(frame, StepRequest):
                    connection.send(SequenceEnded(sequence_id=frame.sequence_id, failure=encode_failure(_no_session())))
            case _:
                raise PeerViolation(f"a server takes no {type(frame).__name__}", peer_id=connection.peer_id)

    def _sign_ended(self, close: CloseSequence, connection: MultiplexedConnection) -> None:
        """Sign an answer whose session the server has ended just before the client closed it."""
        _, log = self._ended.pop((connection.peer_id, close.sequence_id), (0.0, None))
        if log is not None and close.commit_to:
            connection.send(log.signed(self._services.network, close.commit_to))

    def _open(self, wanted: OpenSequence, state: _ConnectionState) -> None:
        connection = state.connection
        key = connection.peer_id, wanted.sequence_id
        if key in self.sessions:
            raise PeerViolation("a session is opened twice", peer_id=connection.peer_id)
        try:
            self._waiting.check(connection.peer_id)
            session = self._admit(wanted, connection)
        except SwarmError as error:
            self.num_refused[reason := _reason(error)] += 1
            if reason == "busy":
                self._waiting.refused(connection)
            connection.send(SequenceEnded(sequence_id=wanted.sequence_id, failure=encode_failure(error)))
            return
        self.sessions[key] = session
        prepare = partial(self._prepare, session, wanted) if _must_prepare(wanted) else None
        session.task = state.tasks.create_task(session.run(prepare), name="session")
        if prepare is None:
            session.ready()
        self._on_changed()

    def _admit(self, wanted: OpenSequence, connection: MultiplexedConnection) -> ServerSession:
        """Make a session for the client, if there is room. Raises PeerRefused."""
        deployed = self._offered()
        if wanted.revision != deployed.loaded.revision:
            raise PeerRefused(f"this server has revision {deployed.loaded.revision}", remedy="look up its record")
        span, provider = deployed.engine.span, self._services.network.provider_of(connection.peer_id)
        if wanted.sampler is not None and wanted.end != span.num_blocks:
            raise PeerViolation("only the session of the last block has a sampler", peer_id=connection.peer_id)
        if wanted.sampler is not None and wanted.sampler.grammar is not None:
            self._grammars.check(Sharer(provider, connection.peer_id))  # first, since opening may end other sequences
        sequence = deployed.engine.open(
            client=connection.peer_id,
            network=provider,
            start=wanted.start,
            end=wanted.end,
            max_tokens=wanted.max_tokens,
            grow_to=wanted.grow_to,
            page_keys=() if wanted.take_over else wanted.page_keys,
            may_skip=wanted.may_skip,
        )
        try:
            asked = wanted.sampler
            sampler = SessionSampler(asked, span.vocab_size, self._grammars, sequence) if asked else None
        except SwarmError:
            sequence.close()
            raise

        def closed() -> None:
            key = connection.peer_id, wanted.sequence_id
            session = self.sessions.pop(key)
            if session.was_ended:
                self._remember(key, session.log)
            self._waiting.tell()
            self._on_changed()

        return ServerSession(connection, wanted, sequence, deployed, self._services, sampler=sampler, on_closed=closed)

    def _remember(self, key: tuple[str, bytes], log: AnswerLog) -> None:
        """Keep the log of an ended session, to sign its answer. Beyond MAX_ENDED, the `greediest` peer loses its
        oldest."""
        self._ended[key] = asyncio.get_running_loop().time(), log
        if len(self._ended) > MAX_ENDED:
            greedy = greediest(Counter(peer_id for peer_id, _ in self._ended), self._services.network.provider_of)
            del self._ended[next(each for each in self._ended if each[0] == greedy)]

    async def _prepare(self, session: ServerSession, wanted: OpenSequence) -> None:
        """Get what the session needs before its first step: its grammar, or the cache of another server. Raises
        SwarmError."""
        if session.draws.sampler is not None:
            await session.draws.sampler.prepare()
        if wanted.take_over is not None:
            await self._take_over(session, wanted.take_over)

    async def _take_over(self, session: ServerSession, source: SequenceRef) -> None:
        """Fetch the cache of the sequence that the session continues. Raises SwarmError."""
        is_in_vain, limiter = False, self.push_connections.dial_limiter
        if not limiter.begin(source.peer_id, session.sequence.sharer):
            raise PeerRefused("the server does not dial that peer now", remedy="run the session again")
        try:
            await take_over(self._services.network, self._services.model, source, session.client, session.sequence)
        except (PeerUnreachable, PeerTimeout, PeerRefused):
            is_in_vain = True
            raise
        finally:
            limiter.end(source.peer_id, session.sequence.sharer, rests=is_in_vain)

    def leave(self, sessions: Collection[ServerSession], within_s: float) -> None:
        """Ask the clients of these sessions to move to other servers."""
        for session in sessions:
            session.leave()
        for connection in {session.connection for session in sessions if session.connection.error is None}:
            connection.send(ServerLeaving(within_s=within_s))

    def end(self, sessions: Collection[ServerSession], error: SwarmError) -> None:
        """End these sessions now, and send their clients the reason."""
        for session in list(sessions):
            session.end(error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            # in a call of its own, so that no variable here keeps a session's memory until the next sweep
            self._end_idle()

    def _end_idle(self) -> None:
        """End idle sessions and connections."""
        now_s = asyncio.get_running_loop().time()
        idle_s = self._options.idle_s
        silent = PeerRefused(f"the session was silent for {idle_s:g} s", remedy="open it again", retry_after_s=1.0)
        for session in list(self.sessions.values()):
            if session.is_sending:  # for minutes, on a slow line: the client has not got the rows that it waits for
                session.sequence.idle_since_s = now_s
            if session.sequence.is_idle and now_s - session.sequence.idle_since_s >= idle_s:
                session.end(silent)
        for state in self._unused():
            if now_s - state.last_s >= IDLE_CONNECTION_S:
                state.connection.end()
        for key in [key for key, (ended_s, _) in self._ended.items() if now_s - ended_s >= SIGN_S]:
            del self._ended[key]


def _must_prepare(wanted: OpenSequence) -> bool:
    """Return whether the session needs preparation before it is ready."""
    return wanted.take_over is not None or (wanted.sampler is not None and wanted.sampler.grammar is not None)


def _deliver(
    session: ServerSession,
    frame: StepRequest | LinkUpdate | AllowHandover | AnswerTokens | DraftText | CloseSequence,
) -> None:
    match frame:
        case StepRequest():
            session.take_step(frame)
        case LinkUpdate():
            session.link(frame)
        case AllowHandover():
            session.may_take_over.append(frame.to_peer_id)
        case AnswerTokens():
            session.recall(frame)
        case DraftText():
            session.draft_from(frame)
        case CloseSequence():
            if frame.commit_to:
                session.sign_answer(frame.commit_to)
            session.close()
            session.connection.forget_rows(("", frame.sequence_id))


def _reason(error: SwarmError) -> Refusal:
    if isinstance(error, PeerRefused):
        return "busy" if error.retry_after_s > 0 else "never"
    return "violation"


def _too_many_connections(remedy: str) -> PeerRefused:
    return PeerRefused("too many connections are open", remedy=remedy, retry_after_s=RETRY_AFTER_S)


def _no_session() -> PeerRefused:
    return PeerRefused("there is no such session here", remedy="open it again", retry_after_s=1.0)
