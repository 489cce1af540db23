"""Runs one client's stateful inference over a chain of servers that may change meanwhile.

`Session` takes requests, carries out the decisions of `session_state`, and reports to it what servers send. Everything
happens in callbacks of one event loop, without waiting: the next steps are sent before the connection reads on. Only
what waits in `stage_connections` (searches, dials, pings) needs tasks, which end with the session.
An exception in one of these, or in a callback, is handled or fails the session, and closing the client fails it, too.
The last server samples.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from swarm_protocol.errors import ConfigError, PeerRefused, PeerViolation, SessionError, SwarmError
from swarm_protocol.records import ServeRecord
from swarm_protocol.rows import row_bytes
from swarm_protocol.sampler import Sampler
from swarm_protocol.session_frames import (
    Frame,
    LinkAck,
    SampledToken,
    SequenceEnded,
    SequenceReady,
    ServerLeaving,
    StepResult,
    TokenDraw,
)

from swarm.deadline_timer import DeadlineTimer
from swarm.ended_tasks import end_tasks
from swarm.serving.checking.finished_answer import Draw
from swarm.serving.model.shape import ModelShape
from swarm.serving.session.answered import ClosedAnswer, LastFrames
from swarm.serving.session.client_state import ClientState, SessionOptions
from swarm.serving.session.connection_pool import ConnectionLost
from swarm.serving.session.peer_health import SUSPECTED_S
from swarm.serving.session.replay_buffer import ReplayMemoryFull
from swarm.serving.session.route_finder import KnownServers
from swarm.serving.session.session_actions import (
    Action,
    AvoidPeer,
    CloseStage,
    Fail,
    FailureCause,
    Feed,
    FindServers,
    ForgetRows,
    OpenStage,
    PingServers,
    Repaired,
    TakeToken,
    UpdateLink,
)
from swarm.serving.session.session_messages import SessionMessages
from swarm.serving.session.session_state import SessionState
from swarm.serving.session.stage import Stage
from swarm.serving.session.stage_connections import StageConnections
from swarm.serving.session.straggler import WAIT_S
from swarm.serving.session.trace import Replay, Trace

logger = logging.getLogger(__name__)

MAX_STEP_BYTES = 2 * 2**20
"""Maximum bytes of activations in one step. Several steps of many clients wait at a server, some hundred MiB in
total."""


class Session:
    """One session, to be used as a context manager, by one task at a time. Leaving it frees the chain.

    It has at most `max_tokens`. Servers reserve room for GROWTH_TOKENS of the answer, and more as it grows. `servers`
    are those known so far. The first request opens the chain; the servers may know its tokens already. A
    request raises NoChain if blocks are missing, or were lost and no server took them over in time. It raises
    ConfigError if replays would need too much memory, PeerError if the servers cannot be looked up, and SessionError if
    server after server fails or the client is closed. After any of these, and after a cancelled request, only leaving
    the session is valid. With a `sampler`, the index of each draw counts from the session's first draw, and a grammar
    that two servers, or the only one, cannot use also raises ConfigError.
    """

    def __init__(
        self,
        state: ClientState,
        model: ModelShape,
        *,
        max_tokens: int,
        servers: Mapping[str, ServeRecord],
        trace: Trace,
        options: SessionOptions,
        sampler: Sampler | None = None,
    ) -> None:
        trace.session_id = uuid4().hex
        trace.codec = options.codec
        self._messages = SessionMessages(
            model,
            state.prefixes,
            options,
            session_id=trace.session_id,
            max_tokens=max_tokens,
            sampler=sampler,
        )
        known = KnownServers(state.health, servers, model)
        self._connections = StageConnections(state, self._messages, known, options)
        num_rows = MAX_STEP_BYTES // row_bytes(options.codec, model.hidden_size)
        max_step_tokens = max(1, min(options.max_step_tokens, num_rows))
        self._state = SessionState(
            model.num_blocks,
            self._messages.new_buffer,
            max_step_tokens=max_step_tokens,
            bytes_beside=partial(state.bytes_beside, self),
            slow_wait_s=random.uniform(WAIT_S, 3 * WAIT_S),
        )
        self._client = state
        self._max_replay_bytes = options.max_replay_bytes
        self._draws: list[Draw] = []
        self._trace = trace
        self._loop = asyncio.get_running_loop()
        self._opening: dict[Stage, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._todo: deque[Action] = deque()
        self._is_busy = False
        self._timer = DeadlineTimer(self._tick)
        self._answers: asyncio.Queue[SampledToken | SwarmError] = asyncio.Queue()
        self._pauses: list[tuple[Replay, float]] = []

    async def __aenter__(self) -> Session:
        self._client.enter(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        for block, buffer in self._state.pipeline.buffers.items():
            self._messages.keep(block, buffer)
        last: Mapping[Stage, LastFrames] = {}
        if self._draws and self._state.error is None and self._client.checks.draws():
            stages = self._connections.remote(self._state.stages)
            answer = ClosedAnswer(self._messages, self._state.pipeline, self._draws, stages, self._trace)
            if self._client.checks.submit(answer):
                last = answer.last
        self._client.leave(self)
        self._timer.cancel()
        self._todo.clear()
        for stage in self._connections.stages:
            self._close_stage(stage, last.get(stage))
            self._client.health.made_room(stage.peer_id)
        await end_tasks(*self._tasks)

    def bytes_under_way(self, peer_id: str) -> int:
        """Return the bytes of the rows that the session waits for from a server, and of their inputs."""
        return sum(stage.bytes_under_way for stage in self._state.stages if stage.peer_id == peer_id)

    async def next_token(self, tokens: Sequence[int], draw: TokenDraw, *, ahead: int = 0) -> SampledToken:
        """Append tokens, and return the token that the last server draws after them. It may draw `ahead` more for
        `next_tokens`."""
        num_tokens = self._messages.num_tokens + len(tokens) + ahead
        if not tokens or num_tokens > self._messages.max_tokens:
            raise ConfigError(
                f"{num_tokens} tokens after {len(tokens) + ahead} more, and the session has room for "
                f"{self._messages.max_tokens}",
                remedy="ask about one token or more, and open a session with room for all",
            )
        if self._state.error is not None:
            raise self._state.error
        assert self._answers.empty(), "tokens of the last request were not taken"
        self._messages.draw = draw
        rows = self._messages.append_tokens(tokens)
        self._carry_out(self._state.ask(rows, self._loop.time(), ahead=ahead))
        return await self._next_answer()

    async def next_tokens(
        self, tokens: Sequence[int], draw: TokenDraw, num_tokens: int
    ) -> AsyncGenerator[SampledToken, None]:
        """Append tokens, and yield the `num_tokens` that the servers draw after them, each at the index after the
        previous one. There are fewer if no server has room for more.

        Servers do not wait for the caller. Unless all tokens were taken, only leaving the session is valid.
        """
        yield await self.next_token(tokens, draw, ahead=num_tokens - 1)
        for _ in range(num_tokens - 1):
            try:
                token = await self._next_answer()
            except SwarmError as error:
                if not _lacks_room(error):
                    raise
                logger.info("an answer ends after %d tokens: %s", len(self._messages.drawn), error)
                return
            yield token

    async def _next_answer(self) -> SampledToken:
        """Return the next answered token. Raises NoChain, ConfigError, PeerError, SessionError."""
        if self._answers.empty() and self._state.error is not None:
            raise self._state.error
        answer = await self._answers.get()
        if isinstance(answer, SwarmError):
            raise answer
        return answer

    def _carry_out(self, actions: list[Action]) -> None:
        """Carry the actions out. Actions that follow from one of them are carried out after the others."""
        self._todo.extend(actions)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._todo:
                self._do(self._todo.popleft())
        finally:
            self._is_busy = False
        self._timer.set(self._state.next_due_s())

    def _do(self, action: Action) -> None:  # noqa: C901 a case an action
        match action:
            case Feed(stage):
                self._connections.send(stage, self._messages.step(action, self._state.pipeline.buffers[stage.start]))
            case TakeToken():
                self._take_token(action)
            case UpdateLink(stage):
                self._connections.send(stage, self._messages.link(stage))
            case OpenStage(stage):
                self._opening[stage] = self._start(self._open_stage(action), name="open a sequence")
            case CloseStage(stage):
                self._close_stage(stage)
            case FindServers():
                self._start(self._find(action), name="find servers")
            case AvoidPeer(_, error) if not (isinstance(error, ConfigError) and error.field == "grammar"):
                # a server that cannot follow a grammar may serve sessions without one
                self._client.health.blame(action, self._messages.room_tokens, has_grammar=self._messages.has_grammar)
            case PingServers():
                self._start(self._ping(action), name="ping servers")
            case ForgetRows(peers):
                self._messages.forget()
                for peer_id in peers:
                    self._client.health.doubt(peer_id, for_s=SUSPECTED_S)
            case Repaired():
                self._note_repair(action)
            case Fail(error):
                self._answers.put_nowait(error)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_ended)
        return task

    def _on_task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelling():
            return  # the session needs it no longer
        error = asyncio.CancelledError("what it waited for") if task.cancelled() else task.exception()
        if error is not None:
            self._fail_internally(error)

    def _react(self, decide: Callable[[], list[Action]]) -> None:
        """Carry out what a callback decides. An exception fails the session, since nobody else would learn of it."""
        try:
            self._carry_out(decide())
        except Exception as error:
            self._fail_internally(error)

    def _tick(self) -> None:
        self._react(partial(self._state.tick, self._loop.time()))

    def _fail_internally(self, error: BaseException) -> None:
        logger.error("a session has failed internally", exc_info=error)
        self._todo.clear()
        self.give_up(SessionError("the session failed internally", remedy="ask again; the log says why"))

    def give_up(self, error: SwarmError) -> None:
        """Fail the session with `error`."""
        self._carry_out(self._state.give_up(error, self._loop.time()))

    def _take_token(self, action: TakeToken) -> None:
        token = action.token
        self._messages.drawn.append(token.token_id)
        if self._client.checks.is_on:
            draw = replace(self._messages.draw, index=self._messages.draw.index + action.num_drawn, ahead=0)
            self._draws.append(Draw(position=self._messages.num_tokens - 1, draw=draw, token=token))
        for replay, since_s in self._pauses:
            replay.failover_ms = (self._loop.time() - since_s) * 1000
        self._pauses.clear()
        self._answers.put_nowait(token)
        if action.goes_on:
            self._messages.append_tokens([token.token_id])

    def _note_repair(self, action: Repaired) -> None:
        repair = action.repair
        for stage, known in self._messages.tokens_so_far(repair.new, self._state.pipeline.buffers[0]):
            self._connections.send(stage, known)
        self._trace.hops += [stage.trace for stage in repair.new]
        if not repair.lost_peer:
            self._trace.num_reused_tokens = min(stage.num_run for stage in repair.new)
            return
        replay = action.replay(self._loop.time())
        self._trace.replays.append(replay)
        if self._state.pipeline.is_asked:
            self._pauses.append((replay, repair.since_s))

    async def _open_stage(self, action: OpenStage) -> None:
        stage = action.stage
        try:
            await self._connections.open(action, partial(self._receive, stage))
        except SwarmError as error:
            del self._opening[stage]  # closing the stage must not cancel this task
            self._carry_out(self._state.on_lost(stage, error, FailureCause.SILENT, self._loop.time()))

    def _close_stage(self, stage: Stage, last: LastFrames | None = None) -> None:
        if opening := self._opening.pop(stage, None):
            opening.cancel()
        commit_to = self._draws[-1].position + 1 if self._draws else 0
        self._connections.close(stage, commit_to, last)

    def _receive(self, stage: Stage, message: Frame | ConnectionLost) -> None:
        """Process a message for this stage. The connection's task calls this."""
        self._react(partial(self._read_or_lose, stage, message, self._loop.time()))

    def _read_or_lose(self, stage: Stage, message: Frame | ConnectionLost, now_s: float) -> list[Action]:
        try:
            return self._read(stage, message, now_s)
        except PeerViolation as error:
            error.peer_id = stage.peer_id
            return self._state.on_lost(stage, error, FailureCause.VIOLATION, now_s)

    def _read(self, stage: Stage, message: Frame | ConnectionLost, now_s: float) -> list[Action]:  # noqa: PLR0911 a case a frame
        """Return the actions that follow from a message. Raises PeerViolation for a frame that servers do not send."""
        match message:
            case StepResult():
                report = self._messages.check_result(stage, message)
                self._trace.codec_error = max(self._trace.codec_error, message.codec_error)
                actions = self._state.on_report(stage, report, now_s)
                if (num_bytes := self._state.pipeline.num_bytes) > self._max_replay_bytes:
                    return self._state.give_up(ReplayMemoryFull(num_bytes, self._max_replay_bytes), now_s)
                self._client.health.worked(stage.peer_id)
                return actions
            case LinkAck():
                return self._state.on_link_ack(stage, message.num_links, message.position, now_s)
            case SequenceReady():
                self._client.health.worked(stage.peer_id)
                self._messages.note_pages(stage, self._state.pipeline.length)
                return self._state.on_opened(stage, message, now_s)
            case SequenceEnded():
                error = message.error(stage.peer_id)
                if isinstance(error, ConfigError) and self._messages.follows_grammar(stage):
                    error.field = "grammar"  # the server's error does not name the field
                    if not self._connections.finder.leave_out(stage.hop):
                        return self._state.give_up(error, now_s)
                return self._state.on_lost(stage, error, FailureCause.REPORTED, now_s)
            case ServerLeaving():
                return self._state.on_leaving(stage, now_s)
            case ConnectionLost(lost):
                return self._state.on_lost(stage, lost, FailureCause.SILENT, now_s)
        raise PeerViolation(f"a server does not send {type(message).__name__} to a client")

    async def _find(self, find: FindServers) -> None:
        repair = find.repair
        try:
            new = await self._connections.find(repair, self._state.peers_beside(repair))
            self._check_memory({stage.start for stage in new})
        except SwarmError as error:
            self._carry_out(self._state.on_not_found(repair, error, self._loop.time()))
            return
        if repair.old is not None:
            await self._connections.dial(new)  # before the sequence that is handed over has to pause
        self._carry_out(self._state.on_found(repair, new, self._loop.time()))

    async def _ping(self, action: PingServers) -> None:
        asked = self._connections.remote(action.stages)  # the others are still being dialled, which takes its own time
        silent = await self._connections.silent(asked, action.timeout_s)
        self._carry_out(self._state.on_pinged(silent, self._loop.time()))

    def _check_memory(self, starts: set[int]) -> None:
        """Raise ReplayMemoryFull if the inputs of spans that begin at `starts` would take too much memory."""
        boundaries = starts | self._state.pipeline.buffers.keys()
        num_bytes = self._messages.room_tokens * sum(self._messages.row_bytes(block) for block in boundaries)
        if num_bytes > self._max_replay_bytes:
            raise ReplayMemoryFull(num_bytes, self._max_replay_bytes)


def _lacks_room(error: SwarmError) -> bool:
    """Return whether the session could not grow: a server lacked room for it, and no other one took over."""
    cause = error.__cause__
    return isinstance(error, ReplayMemoryFull) or (isinstance(cause, PeerRefused) and cause.lacks_room)
