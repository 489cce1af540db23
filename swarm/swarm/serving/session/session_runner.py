"""Carries out what a `Course` decides: seats on lanes, searches, deadlines; and tells it what is heard.

All of it happens in callbacks of one event loop, without waiting: a result that a lane delivers is answered with the
next steps before the lane reads on. Only opening lanes and looking for servers take tasks, which `close` ends.
Leaves what is sent and read to `speech`, decisions to `course`, and questions and answers to `session`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import Any

from swarm_protocol.errors import ConfigError, PeerError, PeerRefused, PeerViolation, SwarmError
from swarm_protocol.session_frames import Frame, LinkAck, SampledToken
from torch import Tensor

from swarm.router import routing
from swarm.router.routing import NoChain
from swarm.serving.session.actions import (
    Action,
    Answer,
    Blame,
    Cause,
    CloseSeat,
    Fail,
    Feed,
    Find,
    Hand,
    OpenSeat,
    Relink,
    Repaired,
)
from swarm.serving.session.client_state import ClientState
from swarm.serving.session.connection_pool import ClientConnection, ConnectionLost
from swarm.serving.session.hop import Hop, StepTimer
from swarm.serving.session.route_finder import RouteFinder
from swarm.serving.session.session_decisions import Course
from swarm.serving.session.session_messages import Heard, Left, Opened, Output, Speech
from swarm.serving.session.trace import HopTrace, Replay, Trace

logger = logging.getLogger(__name__)


class Pilot:
    """Of one session. After `Fail`, and after cancelling `ask`, fit only to be closed."""

    def __init__(
        self,
        course: Course,
        speech: Speech,
        state: ClientState,
        finder: RouteFinder,
        *,
        max_replay_bytes: int,
        trace: Trace,
    ) -> None:
        self._course = course
        self._speech = speech
        self._lanes = state.connections
        self._health = state.health
        self._finder = finder
        self._model = speech.model
        self._max_replay_bytes = max_replay_bytes
        self._trace = trace
        self._loop = asyncio.get_running_loop()
        self._lane_of: dict[Hop, ClientConnection] = {}
        self._opening: dict[Hop, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._todo: deque[Action] = deque()
        self._is_busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._outputs: list[Output] = []
        self._heard: Output | None = None
        self._answers: deque[list[Output]] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._pauses: list[tuple[Replay, float]] = []

    async def ask(self, rows: bytes, want: str, *, ahead: int = 0) -> list[Output]:
        """The outputs that answer, in order; after a token `ahead` more may be had. Raises NoChain, SessionError."""
        if self._course.error is not None:
            raise self._course.error
        assert not self._answers, "tokens of the last question were not taken"
        self._carry_out(self._course.ask(rows, want, self._loop.time(), ahead=ahead))
        return await self.more()

    async def more(self) -> list[Output]:
        """What is answered next. Raises NoChain, SessionError."""
        if not self._answers:
            if self._course.error is not None:
                raise self._course.error
            self._waiting = self._loop.create_future()
            await self._waiting
        return self._answers.popleft()

    async def close(self) -> None:
        """Free the chain."""
        if self._timer is not None:
            self._timer.cancel()
        self._todo.clear()
        tasks = [*self._tasks, *self._opening.values()]
        for task in tasks:
            task.cancel()
        for hop in list(self._lane_of):
            self._close_seat(hop)
        if tasks:
            await asyncio.wait(tasks)

    # --- what the course wants --------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        """Also when one of them fails and has others follow: those come after."""
        self._todo.extend(actions)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._todo:
                self._do(self._todo.popleft())
        finally:
            self._is_busy = False
        self._set_timer()

    def _do(self, action: Action) -> None:  # noqa: C901 a case an action
        match action:
            case Feed(hop):
                self._send(hop, self._speech.step(action, self._course.ledgers[hop.start]))
            case Answer():
                self._take_answer(action)
            case Relink(hop):
                self._send(hop, self._speech.link(hop))
            case Hand(hop):
                self._send(hop, self._speech.hand(action))
            case OpenSeat(hop):
                self._opening[hop] = self._loop.create_task(self._open_seat(action), name="open seat")
            case CloseSeat(hop):
                self._close_seat(hop)
            case Find():
                self._start(self._find(action))
            case Blame():
                self._blame(action)
            case Repaired():
                self._note_repair(action)
            case Fail(error):
                if self._waiting is not None and not self._waiting.done():
                    self._waiting.set_exception(error)

    def _send(self, hop: Hop, frame: Frame) -> None:
        """A lane that is broken says so to its seats by itself."""
        lane = self._lane_of.get(hop)
        if lane is not None:
            lane.send(frame)

    def _take_answer(self, action: Answer) -> None:
        assert self._heard is not None
        if isinstance(self._heard, SampledToken):
            self._speech.drawn.append(self._heard.token_id)
        self._outputs.append(self._heard[action.skip :] if isinstance(self._heard, Tensor) else self._heard)
        if not action.is_last:
            return
        now_s = self._loop.time()
        for replay, since_s in self._pauses:
            replay.failover_ms = (now_s - since_s) * 1000
        self._pauses.clear()
        self._answers.append(self._outputs)
        self._outputs = []
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        if action.goes_on:
            assert isinstance(self._heard, SampledToken)
            row = self._speech.know([self._heard.token_id])
            self._carry_out(self._course.follow(row, now_s))

    def _blame(self, blame: Blame) -> None:
        error = blame.error
        logger.info("%s: %s", blame.peer_id, error)
        if isinstance(error, PeerViolation) and blame.cause is not Cause.JUDGED:
            # who finds fault with us is not at fault
            error = PeerError(error.message, peer_id=blame.peer_id)
        if isinstance(error, PeerRefused) and error.retry_after_s:
            self._health.refused(blame.peer_id, self._speech.max_tokens, error.retry_after_s)
        else:
            self._health.failed(blame.peer_id, error)

    def _note_repair(self, action: Repaired) -> None:
        repair = action.repair
        if recalled := self._speech.recall(repair.fresh):
            self._send(*recalled)
        self._trace.hops += [hop.trace for hop in repair.fresh]
        if not repair.lost_peer:
            self._trace.num_reused_tokens = min(hop.done for hop in repair.fresh)
            return
        replay = Replay(
            lost_peer=repair.lost_peer,
            start=repair.start,
            end=repair.end,
            reason=repair.error.message if repair.error else "",
            new_peers=tuple(hop.peer_id for hop in repair.fresh),
            num_tokens=action.num_tokens,
            was_handed_over=repair.is_handing,
            failover_ms=(self._loop.time() - repair.since_s) * 1000,
        )
        self._trace.replays.append(replay)
        if self._course.is_asked:
            self._pauses.append((replay, repair.since_s))

    # --- seats ------------------------------------------------------------------------------------------------------

    async def _open_seat(self, action: OpenSeat) -> None:
        hop = action.hop
        try:
            lane = await self._lanes.get(hop.peer_id, self._model)
            lane.attach(hop.sequence_id, partial(self._hear, hop))
        except SwarmError as error:
            del self._opening[hop]
            self._carry_out(self._course.lost(hop, error, Cause.GONE, self._loop.time()))
            return
        del self._opening[hop]
        self._lane_of[hop] = lane
        self._health.opened(hop.peer_id)
        hop.since_s = self._loop.time()
        lane.send(self._speech.open(action))

    def _close_seat(self, hop: Hop) -> None:
        if opening := self._opening.pop(hop, None):
            opening.cancel()
            self._tasks.add(opening)
            opening.add_done_callback(self._tasks.discard)
        lane = self._lane_of.pop(hop, None)
        if lane is not None:
            self._health.closed(hop.peer_id)
            lane.send(self._speech.close(hop))
            lane.detach(hop.sequence_id)

    def _hear(self, hop: Hop, message: Frame | ConnectionLost) -> None:
        """From the lane's task: something for this seat."""
        now_s = self._loop.time()
        try:
            actions = self._judge(hop, message, now_s)
        except PeerViolation as error:
            error.peer_id = hop.peer_id
            actions = self._course.lost(hop, error, Cause.JUDGED, now_s)
        self._carry_out(actions)

    def _judge(self, hop: Hop, message: Frame | ConnectionLost, now_s: float) -> list[Action]:
        if isinstance(message, ConnectionLost):
            return self._course.lost(hop, message.error, Cause.GONE, now_s)
        match heard := self._speech.understand(hop, message):
            case Heard():
                self._heard = heard.output
                self._trace.codec_error = max(self._trace.codec_error, heard.codec_error)
                actions = self._course.ran(hop, heard.ran, now_s)
                self._health.worked(hop.peer_id)
                return actions
            case LinkAck(num_links=num_links, position=position):
                return self._course.linked(hop, num_links, position, now_s)
            case Opened(length, max_step_tokens):
                self._health.worked(hop.peer_id)
                return self._course.ready(hop, length, max_step_tokens, now_s)
            case Left(error):
                return self._left(hop, error, now_s)

    def _left(self, hop: Hop, error: SwarmError | None, now_s: float) -> list[Action]:
        if error is None:
            self._course.leaving(hop)
            return self._course.tick(now_s)
        if isinstance(error, ConfigError) and self._speech.has_grammar:
            return self._course.give_up(error, now_s)  # no server can use the grammar
        return self._course.lost(hop, error, Cause.TOLD, now_s)

    # --- time and tasks ---------------------------------------------------------------------------------------------

    async def _find(self, find: Find) -> None:
        repair = find.repair
        try:
            since_s = repair.begun_s if repair.has_patience else None
            beside = self._course.beside(repair)
            between = beside.previous_peer_id, beside.next_peer_id
            chain = await self._finder.find(repair.start, repair.end, between, since_s=since_s)
            self._check_memory({hop.start for hop in chain})
        except (NoChain, ConfigError) as error:
            self._carry_out(self._course.not_found(repair, error, self._loop.time()))
        else:
            if repair.old is not None:
                # dialled before the seat that is handed over has to stand still
                dialling = [self._lanes.get(found.peer_id, self._model) for found in chain]
                await asyncio.gather(*dialling, return_exceptions=True)
            hops = [self._new_hop(candidate) for candidate in chain]
            self._carry_out(self._course.found(repair, hops, self._loop.time()))

    def _check_memory(self, starts: set[int]) -> None:
        """Raises ConfigError if keeping the inputs of spans that begin there takes too much."""
        boundaries = starts | self._course.ledgers.keys()
        num_bytes = self._speech.max_tokens * sum(self._speech.row_bytes(block) for block in boundaries)
        if num_bytes > self._max_replay_bytes:
            raise ConfigError(
                f"surviving a failure would take {num_bytes} bytes here, and {self._max_replay_bytes} are allowed",
                remedy="ask for fewer tokens or allow more memory",
            )

    def _new_hop(self, planned: routing.Hop) -> Hop:
        return Hop(
            peer_id=planned.peer_id,
            start=planned.start,
            end=planned.end,
            sequence_id=secrets.token_bytes(16),
            timer=StepTimer(planned.record, planned.end - planned.start),
            row_bytes=self._speech.row_bytes(planned.start),
            trace=HopTrace(peer_id=planned.peer_id, start=planned.start, end=planned.end),
        )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name="find servers")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_timer(self) -> None:
        due_s = self._course.next_s()
        # one that is too early only looks and is set again, which is rarer than a step
        if due_s >= self._timer_s or math.isinf(due_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = due_s
        self._timer = self._loop.call_at(due_s, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_s = None, math.inf
        self._carry_out(self._course.tick(self._loop.time()))
