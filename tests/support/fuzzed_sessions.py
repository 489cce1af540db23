"""Histories of a client's session with servers that say what they like, and of a server's session with such a client.

`play_session` and `play_inbox` draw a history from the bytes they are given. Every frame passes through its encoding,
both ways, often with a field or three changed. The client's history reads frames as `Session` does, which does the same
with connections and tasks.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from support.fuzzing import Target
from support.hostile_values import altered
from support.plain_records import serve_record
from swarm.router.routing import Hop
from swarm.serving.model.shape import ModelShape
from swarm.serving.peer_shares import Sharer
from swarm.serving.server.session_queues import MAX_INBOX, Backpressure, SessionInbox
from swarm.serving.session.client_state import PrefixStore, SessionOptions
from swarm.serving.session.session_actions import (
    Action,
    CloseStage,
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
from swarm_protocol.errors import PeerRefused, PeerUnreachable, PeerViolation, SessionError, SwarmError
from swarm_protocol.failure_messages import encode_failure
from swarm_protocol.frames import Frames
from swarm_protocol.identity import Identity
from swarm_protocol.rows import TOKENS, Rows, row_bytes
from swarm_protocol.session_frames import (
    Frame,
    LinkAck,
    Push,
    SampledToken,
    SequenceEnded,
    SequenceReady,
    ServerLeaving,
    StepRequest,
    StepResult,
    TokenDraw,
)

T = TypeVar("T")
NUM_BLOCKS, HIDDEN_SIZE, VOCAB_SIZE = 4, 8, 50
MAX_TOKENS = 160
NUM_EVENTS = 60
PEERS = tuple(Identity(bytes([number]) * 32).peer_id for number in range(5))
MISSING = SessionError("blocks are missing")
RECORD = serve_record(0, NUM_BLOCKS, prefill_ms_per_token=0.1, decode_ms_per_block=0.1)


class SessionHistory:
    """One history: `happened` counts frames, violations, answers and what the client decided."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now_s = 0.0
        self.happened: Counter[str] = Counter()
        shape = ModelShape(
            name="m", revision="r", num_blocks=NUM_BLOCKS, hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE
        )
        self.messages = SessionMessages(
            shape,
            PrefixStore(max_bytes=4096),
            SessionOptions(codec=chance.choice(("raw", "bf16", "int8"))),
            session_id="s",
            max_tokens=MAX_TOKENS,
        )
        self.state = SessionState(NUM_BLOCKS, self.messages.new_buffer, max_step_tokens=chance.choice((1, 4, 64)))
        self.num_tokens = 0
        self._attached: list[Stage] = []
        self._searches: list[FindServers] = []
        self._expected: deque[tuple[Stage, Frame]] = deque()

    def play(self, num_events: int) -> None:
        for _ in range(num_events):
            self.now_s += self.chance.choice((0.0, 0.001, 0.1, 3.0))
            if self.state.error is None and not self.state.pipeline.is_asked:
                self.ask()
            self._something()
            self.check_bounded()

    def ask(self) -> None:
        num_new, ahead = self.chance.choice((1, 1, 3, 20)), self.chance.choice((0, 0, 1, 8))
        if self.num_tokens + num_new + ahead > MAX_TOKENS:
            return
        self.num_tokens += num_new + ahead
        rows = self.messages.append_tokens([self.chance.randrange(VOCAB_SIZE) for _ in range(num_new)])
        self.carry_out(self.state.ask(rows, self.now_s, ahead=ahead))

    def _something(self) -> None:
        draw = self.chance.random()
        if self._searches and draw < 0.5:
            self._end_search(self._searches.pop(0))
        elif draw < 0.05:
            self.now_s = max(self.now_s, min(self.state.next_due_s(), self.now_s + 1000.0))
            self.carry_out(self.state.tick(self.now_s))
        elif draw < 0.07 and self._attached:
            lost = PeerUnreachable("the connection broke")
            self.carry_out(
                self.state.on_lost(self.chance.choice(self._attached), lost, FailureCause.SILENT, self.now_s)
            )
        elif self._expected and draw < 0.85:
            stage, frame = self._expected.popleft()
            if stage in self._attached:
                self.hear(stage, frame, unchanged=0.8)
        elif self._attached:
            stage = self.chance.choice(self._attached)
            self.hear(stage, self._any_frame(stage), unchanged=0.5)

    def _end_search(self, find: FindServers) -> None:
        repair = find.repair
        if self.chance.random() < 0.1:
            self.carry_out(self.state.on_not_found(repair, MISSING, self.now_s))
            return
        cuts = [block for block in range(repair.start + 1, repair.end) if self.chance.random() < 0.4]
        ends = [*cuts, repair.end]
        new = [self._stage(start, end) for start, end in zip([repair.start, *cuts], ends, strict=True)]
        self.carry_out(self.state.on_found(repair, new, self.now_s))

    def _stage(self, start: int, end: int) -> Stage:
        return Stage(
            hop=Hop(peer_id=self.chance.choice(PEERS), start=start, end=end, cost_ms=math.inf, record=RECORD),
            sequence_id=self.chance.randbytes(16),
            row_bytes=self.messages.row_bytes(start),
            is_local=start > 0 and self.chance.random() < 0.2,
        )

    def carry_out(self, actions: Sequence[Action]) -> None:
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            self.happened[type(action).__name__] += 1
            todo.extend(self._do(action))

    def _do(self, action: Action) -> Sequence[Action]:  # noqa: C901 - a case an action
        match action:
            case FindServers():
                self._searches.append(action)
            case OpenStage(stage):
                self._attached.append(stage)
                self._send(self.messages.open(action))
                length = self.chance.choice((0, 0, stage.may_skip, self.state.pipeline.length))
                opened = SequenceReady(sequence_id=stage.sequence_id, max_step_tokens=16, length=length)
                self._expected.append((stage, opened))
            case Feed(stage):
                self._send(self.messages.step(action, self.state.pipeline.buffers[stage.start]))
                self._expected.append((stage, self._result(stage, action.end, action.end - action.start)))
            case UpdateLink(stage):
                self._send(self.messages.link(stage))
                ack = LinkAck(sequence_id=stage.sequence_id, num_links=stage.link.num_updates, position=stage.num_run)
                self._expected.append((stage, ack))
            case CloseStage(stage):
                self._send(self.messages.close(stage, 0))
                if stage in self._attached:
                    self._attached.remove(stage)
            case PingServers(stages):
                silent = [stage for stage in stages if self.chance.random() < 0.1]
                return self.state.on_pinged(silent, self.now_s)
            case ForgetRows():
                self.messages.forget()
            case Repaired(repair):
                for _, frame in self.messages.tokens_so_far(repair.new, self.state.pipeline.buffers[0]):
                    self._send(frame)
            case TakeToken(token, _, goes_on):
                self.messages.drawn.append(token.token_id)
                if goes_on:
                    self.messages.append_tokens([token.token_id])
        return ()

    def _send(self, frame: Frame) -> None:
        Frames((frame,)).to_bytes()

    def hear(self, stage: Stage, frame: Frame, unchanged: float) -> None:
        """Take a frame for this stage as `Session` does."""
        if self.chance.random() > unchanged:
            frame = altered(frame, self.chance, num_changes=self.chance.choice((1, 1, 3)))
        for arrived in decoded(frame):
            self.happened[type(arrived).__name__] += 1
            try:
                actions = self._read(stage, arrived)
            except PeerViolation as error:
                self.happened["violations"] += 1
                actions = self.state.on_lost(stage, error, FailureCause.VIOLATION, self.now_s)
            self.carry_out(actions)

    def _read(self, stage: Stage, frame: Frame) -> list[Action]:
        state, now_s = self.state, self.now_s
        match frame:
            case StepResult():
                return state.on_report(stage, self.messages.check_result(stage, frame), now_s)
            case LinkAck():
                return state.on_link_ack(stage, frame.num_links, frame.position, now_s)
            case SequenceReady():
                return state.on_opened(stage, frame, now_s)
            case SequenceEnded():
                return state.on_lost(stage, frame.error(stage.peer_id), FailureCause.REPORTED, now_s)
            case ServerLeaving():
                return state.on_leaving(stage, now_s)
        raise PeerViolation("no server sends this")

    def _any_frame(self, stage: Stage) -> Frame:
        chance, length = self.chance, self.state.pipeline.length
        position = chance.choice((stage.num_run, stage.num_run + 1, length, length + 1, chance.randrange(MAX_TOKENS)))
        match chance.randrange(6):
            case 0:
                return LinkAck(sequence_id=stage.sequence_id, num_links=chance.randrange(1, 4), position=position)
            case 1:
                return SequenceReady(sequence_id=stage.sequence_id, max_step_tokens=1, length=position)
            case 2 if chance.random() < 0.2:
                refused = PeerRefused("full", retry_after_s=chance.choice((0.0, 2.5)))
                failure = encode_failure(chance.choice((refused, SessionError("not finite"))))
                return SequenceEnded(sequence_id=stage.sequence_id, failure=failure)
            case 3 if chance.random() < 0.3:
                return ServerLeaving(within_s=30.0)
        return self._result(stage, position, min(position, chance.choice((0, 1, 2, position))))

    def _result(self, stage: Stage, position: int, num_rows: int) -> StepResult:
        chance, codec = self.chance, self.messages.codec
        is_last = stage.end == NUM_BLOCKS
        rows = token = None
        if is_last and chance.random() < 0.9:
            token = SampledToken(token_id=chance.choice((0, 7, VOCAB_SIZE - 1)))
        elif not is_last and num_rows:
            num_columns = HIDDEN_SIZE
            if chance.random() < 0.05:
                codec, num_columns = chance.choice(("raw", "bf16", "int8")), chance.choice((1, HIDDEN_SIZE))
            payload = bytes([chance.choice((0, 0, 0, 255))]) * (num_rows * row_bytes(codec, num_columns))
            rows = Rows(codec=codec, num_rows=num_rows, num_columns=num_columns, payload=payload)
        return StepResult(
            sequence_id=stage.sequence_id,
            position=position,
            rows=rows,
            token=token,
            compute_ms=chance.choice((0.0, 1.5, 1e5)),
            push_failed=chance.random() < 0.1,
            passed_on=chance.random() < 0.3,
            looped=is_last and chance.random() < 0.3,
            drafted=token is not None and chance.random() < 0.2,
            num_drafts=chance.randrange(min(num_rows, 3)) if rows is not None and chance.random() < 0.3 else 0,
            num_links=stage.link.num_updates if chance.random() < 0.8 else chance.randrange(3),
        )

    def check_bounded(self) -> None:
        """Raises AssertionError if the session keeps more than its tokens' rows at each boundary, and as much again for
        each server that is ahead of the client."""
        pipeline, most = self.state.pipeline, MAX_TOKENS * self.messages.row_bytes(1)
        assert set(pipeline.buffers) <= set(range(NUM_BLOCKS))
        assert all(buffer.length <= pipeline.length <= MAX_TOKENS for buffer in pipeline.buffers.values())
        for stage in pipeline.stages:
            assert len(stage.early) <= pipeline.request.ahead + 1
            assert sum(len(report.rows) for report in stage.early) <= most
        assert len(self.state.repairs) <= NUM_BLOCKS
        assert len(self._attached) <= 3 * NUM_BLOCKS


def decoded(frame: Any) -> tuple[Frame, ...]:
    """Return what arrives of a frame: nothing if it cannot be encoded, or is refused when it is decoded."""
    try:
        data = Frames((frame,)).to_bytes()
    except (ValueError, TypeError, AttributeError, OverflowError):
        return ()
    try:
        return Frames.from_bytes(data).frames
    except PeerViolation:
        return ()


def play_session(data: bytes) -> Mapping[str, int]:
    """Play the history that `data` draws. Returns how often what happened. Raises AssertionError, or what the session's
    state raises and should not."""
    history = SessionHistory(random.Random(data))
    history.play(NUM_EVENTS)
    return history.happened


class HeldSequence:
    """What an inbox uses of an `EngineSequence`, without the engine."""

    max_tokens, blocks, sharer = MAX_TOKENS, (0, NUM_BLOCKS), Sharer("network", "client")

    def __init__(self, start: int, length: int) -> None:
        self.blocks, self.length, self.num_queued = (start, NUM_BLOCKS), length, 0

    def room_for_drafts(self, position: int) -> int:
        return max(0, min(7, self.max_tokens - position))


MAX_STEP_TOKENS = 32
SPAN: Any = SimpleNamespace(num_blocks=NUM_BLOCKS, hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE)


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("it waits")


def step_request(chance: random.Random, length: int, right_codec: str) -> StepRequest:
    codec = right_codec if chance.random() < 0.8 else chance.choice(("tokens", "raw", "bf16", "int8"))
    num_rows, num_columns = chance.choice((1, 1, 1, 1, 20, 40)), 0 if codec == "tokens" else HIDDEN_SIZE
    position = chance.choice((0, length, length, max(0, length - 2), length + 1, MAX_TOKENS - 1))
    payload = bytes(num_rows * row_bytes(codec, num_columns))
    if chance.random() < 0.2:
        payload = chance.randbytes(len(payload))
    rows = Rows(codec=codec, num_rows=num_rows, num_columns=num_columns, payload=payload)
    want = chance.choice(("nothing", "last", "all"))
    return StepRequest(sequence_id=bytes(16), position=position, want=want, forward=chance.random() < 0.5, rows=rows)


def push_of(request: StepRequest, num_drafts: int) -> Push:
    """Return what the previous server would push in place of the request: a token and drafts."""
    rows = request.rows
    payload = bytes(rows.payload)[: rows.row_bytes] * (1 + num_drafts)
    return Push(
        client_peer_id=PEERS[0],
        sequence_id=request.sequence_id,
        position=request.position,
        want="token",
        draw=TokenDraw(),
        rows=Rows(codec=rows.codec, num_rows=1 + num_drafts, num_columns=rows.num_columns, payload=payload),
        source_id=bytes(16),
        num_drafts=num_drafts,
    )


def play_inbox(data: bytes) -> Mapping[str, int]:
    """Send a server's session what no honest client sends, while it computes some of it. Returns how often what
    happened. Raises AssertionError if more waits than may, or if bytes are counted that are not there."""
    chance, happened = random.Random(data), Counter[str]()
    max_bytes, is_idle = chance.choice((512, 2**20)), chance.random() < 0.3
    backpressure, taken = Backpressure(max_bytes), list[int]()
    codec = chance.choice(("raw", "bf16", "int8"))
    sequence: Any = HeldSequence(chance.choice((0, 2)), chance.choice((0, 16)))
    inbox = SessionInbox(
        sequence,
        SPAN,
        codec,
        backpressure,
        max_step_tokens=MAX_STEP_TOKENS,
        on_taken=lambda position, rows: taken.append(position + rows.num_rows),
    )
    inbox.open()
    for _ in range(NUM_EVENTS):
        position = chance.choice((inbox.length, inbox.firm_length))
        request: StepRequest | Push = step_request(chance, position, codec if sequence.blocks[0] else TOKENS)
        if chance.random() < 0.3:
            request = push_of(request, chance.randrange(9))
        before, num_taken = inbox.firm_length, len(taken)
        for frame in decoded(altered(request, chance, num_changes=chance.choice((0, 0, 1, 2)))):
            try:
                if isinstance(frame, StepRequest | Push):
                    inbox.take(frame)
            except SwarmError as error:
                happened[type(error).__name__] += 1
        happened["steps"] += 1
        if not is_idle and chance.random() < 0.3 and sequence.num_queued:
            step = at_once(inbox.next())
            assert step.num_rows == len(step.x) <= MAX_STEP_TOKENS
            inbox.finish(step)
        assert sequence.num_queued <= MAX_INBOX
        assert backpressure.num_bytes <= max_bytes
        assert inbox.firm_length <= inbox.length <= MAX_TOKENS
        if len(taken) > num_taken:
            happened["drafts"] += inbox.firm_length < inbox.length
            assert inbox.firm_length > before, "rows that are no drafts are taken once, in order"
        else:
            assert inbox.firm_length == before
    inbox.close()
    assert backpressure.num_bytes == 0
    return happened


TARGETS = (
    Target(name="history of a session", take=play_session),
    Target(name="history of an inbox", take=play_inbox),
)
