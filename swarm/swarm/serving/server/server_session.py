"""The server's side of one session: what its client and the server before it send, run in order and passed on.

Of the last server the token that it draws is passed on, too, to the first one, as far as the client allows it.

Every frame is judged when it arrives, against the length that the session will have after those before it, and nothing
is computed for one that does not fit. A client that breaks the rules loses its session; what another server pushes
wrongly is refused to that server, and leaves the session as it was. Rows that have been run already are dropped, for a
client that finds a push slow sends the same rows itself. Leaves connections and who owns which session to
`connection_server`, compute to the engine's session. `run` is the task that owns it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from swarm_protocol import limits, session_frames
from swarm_protocol.errors import PeerRefused, PeerViolation, SwarmError
from swarm_protocol.failure_messages import encode_failure
from swarm_protocol.rows import TOKENS, Rows
from swarm_protocol.session_frames import (
    AnswerTokens,
    LinkAck,
    LinkUpdate,
    OpenSequence,
    Push,
    PushRefused,
    SequenceEnded,
    SequenceReady,
    SequenceRef,
    Spent,
    StepRequest,
    StepResult,
)
from torch import Tensor

from swarm.network.interface import FaultHook
from swarm.serving.engine.sequence import EngineSequence
from swarm.serving.model.batch import Want
from swarm.serving.sampling.sampling import LogitEdits, Pick, Picked, Sampling
from swarm.serving.server.backpressure import Backpressure
from swarm.serving.server.forwarder import Forwarder
from swarm.serving.server.result_batcher import FlushTimer, ResultBatcher
from swarm.serving.server.session_sampler import SessionSampler
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection
from swarm.serving.wire.tensor_stream import hidden_of, rows_of, tokens_of

logger = logging.getLogger(__name__)

MAX_INBOX = 16
"""Steps that wait at one session: clients keep four chunks of a prompt under way, and repeat some when a push is
slow."""

MAX_HEIRS = 16
"""Servers among which a leaving one's blocks may be split."""

MAX_REFUSED = 8
"""Pushes that the next server may refuse: whoever wants none is not to be flooded at a client's word."""

_WANTS = {"nothing": Want.NOTHING, "last": Want.LAST, "all": Want.ALL, "token": Want.NOTHING}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What a session must know of the model, and the longest step that its server takes."""

    num_blocks: int
    hidden_size: int
    vocab_size: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedServices:
    """What all sessions of a server share."""

    forwarder: Forwarder
    backpressure: Backpressure
    flush_timer: FlushTimer
    faults: FaultHook


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A step that was found right. `passes_on`: all its outputs are wanted, here and by the next server.

    `upstream_ms`: what the servers before spent on it, as far as that is known.
    """

    position: int
    x: Tensor
    num_rows: int
    want: str
    draw: session_frames.TokenDraw | None
    passes_on: bool
    upstream_ms: tuple[Spent, ...]


class ServerSession:
    """`session` is the engine's, `sampler` of the last block's only. `handed_to` may take its keys and values."""

    def __init__(
        self,
        connection: MultiplexedConnection,
        opened: OpenSequence,
        sequence: EngineSequence,
        sizes: ModelSizes,
        services: SharedServices,
        *,
        sampler: SessionSampler | None,
        on_closed: Callable[[ServerSession], None],
    ) -> None:
        self.client = connection.peer_id
        self.sequence_id = opened.sequence_id
        self.sequence = sequence
        self.handed_to: deque[str] = deque(maxlen=MAX_HEIRS)
        self.task: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()
        self.connection = connection
        self.sampler = sampler
        self._opened = opened
        self._sizes = sizes
        self._forwarder = services.forwarder
        self._backpressure = services.backpressure
        self._faults = services.faults
        self._own = SequenceRef(peer_id=services.forwarder.peer_id, sequence_id=opened.sequence_id)
        self.previous = opened.previous
        self._next: SequenceRef | None = None
        self._num_links = 0
        self._is_cut_off = False  # pushes are lost until the client links again
        self._num_refused = 0
        self._expected: int | None = None  # the length after all that waits; None before the first step
        self._is_ready = False
        self.is_leaving = False
        self._inbox: deque[_Work] = deque()
        self._news = asyncio.Event()
        self._results = ResultBatcher(connection, services.flush_timer)
        self._answered: int | None = None
        self.is_closed = False
        self._on_closed = on_closed
        sequence.on_ended = self.end
        self._link(opened.next)

    @property
    def is_first(self) -> bool:
        return self.sequence.blocks[0] == 0

    @property
    def is_last(self) -> bool:
        return self.sequence.blocks[1] == self._sizes.num_blocks

    # --- what others say --------------------------------------------------------------------------------------------

    def take_step(self, step: StepRequest) -> None:
        """From the client. One that breaks the rules ends the session."""
        try:
            if step.want == "token" and not (self.is_last or step.forward):
                raise PeerViolation("only the last block's output says which token comes next")
            self._take(step, step.rows, passes_on=step.forward and not self.is_last)
        except SwarmError as error:
            self.end(error)

    def take_push(self, push: Push, connection: MultiplexedConnection) -> None:
        """From another server, by its connection, where it hears of it if that was wrong."""
        try:
            named = self.previous
            if named is None or (connection.peer_id, push.source_id) != (named.peer_id, named.sequence_id):
                raise PeerViolation(
                    "the client did not name this session as the one before", peer_id=connection.peer_id
                )
            self._take(push, push.rows, passes_on=not self.is_last, upstream_ms=push.upstream_ms)
        except SwarmError as error:
            refuse_push(push, connection, error)

    def recall(self, drawn: AnswerTokens) -> None:
        """From the client. Raises PeerViolation, which ends its connection."""
        if self.sampler is None:
            raise PeerViolation("tokens of an answer for a session without a sampler", peer_id=self.client)
        self.sampler.recall(drawn.token_ids)

    def link(self, link: LinkUpdate) -> None:
        self._results.flush()  # whoever takes the next server's place is fed with it
        self.previous = link.previous
        self._link(link.next)
        self._is_cut_off, self._num_refused = False, 0
        self._num_links = min(self._num_links + 1, limits.MAX_LINKS)
        known = self.sequence.length if self._expected is None else self._expected
        self.connection.send(LinkAck(sequence_id=self.sequence_id, num_links=self._num_links, position=known))

    def _link(self, to: SequenceRef | None) -> None:
        if to == self._next:
            return
        if self._next is not None:
            self._forwarder.unlink(self._next.peer_id, (self.client, self._next.sequence_id))
        self._next = to
        if to is not None and to != self._own:
            self._forwarder.link(to.peer_id, (self.client, to.sequence_id), self._push_failed)

    def _take(
        self, frame: StepRequest | Push, rows: Rows, *, passes_on: bool, upstream_ms: tuple[Spent, ...] = ()
    ) -> None:
        """Raises PeerViolation, PeerRefused."""
        if not self._is_ready:
            raise PeerRefused("the session is not open yet", retry_after_s=1.0)
        position = frame.position
        known = self._expected
        if known is not None:
            num_run = min(rows.num_rows, known - position)
            if num_run == rows.num_rows:
                return
            if num_run > 0:
                rows, position = rows.without(num_run), known
        if position > (self.sequence.length if known is None else known):
            raise PeerViolation(
                f"rows from position {position} on, and the session ends at {known or self.sequence.length}"
            )
        self._check_size(rows, position, frame.want)
        if len(self._inbox) >= MAX_INBOX:
            raise PeerViolation(f"more than {MAX_INBOX} steps at once")
        x = self._decoded(rows)
        if known is None:
            self.sequence.rewind(position)
        self._backpressure.take(self.client, x.nbytes)
        self._expected = position + rows.num_rows
        work = _Work(
            position=position,
            x=x,
            num_rows=rows.num_rows,
            want=frame.want,
            draw=frame.draw,
            passes_on=passes_on,
            upstream_ms=upstream_ms,
        )
        self._inbox.append(work)
        self._news.set()

    def _check_size(self, rows: Rows, position: int, want: str) -> None:
        num_rows, sizes = rows.num_rows, self._sizes
        if num_rows > sizes.max_step_tokens:
            raise PeerViolation(f"a step of {num_rows} tokens, and this server takes {sizes.max_step_tokens}")
        if position + num_rows > self.sequence.max_tokens:
            raise PeerViolation(f"{position + num_rows} tokens, and the session reserved {self.sequence.max_tokens}")
        if self.is_last and want == "all" and 4 * num_rows * sizes.vocab_size > limits.MAX_MESSAGE_BYTES // 2:
            raise PeerViolation(f"the logits of {num_rows} tokens are too large for one message")

    def _decoded(self, rows: Rows) -> Tensor:
        if self.is_first:
            return tokens_of(rows, self._sizes.vocab_size)
        return hidden_of(rows, self._opened.codec, self._sizes.hidden_size)

    # --- the task ---------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Steps may come."""
        self._is_ready = True
        held = SequenceReady(
            sequence_id=self.sequence_id, max_step_tokens=self._sizes.max_step_tokens, length=self.sequence.length
        )
        self.connection.send(held)

    async def run(self) -> None:
        """Until it has ended. The client is told why, unless it was it that ended it."""
        try:
            while True:
                while not self._inbox:
                    self._news.clear()
                    await self._news.wait()
                await self._run_one(self._inbox.popleft())
        except SwarmError as error:
            self.end(error)
        except Exception as error:
            logger.exception("a session failed")
            self.end(error)
        finally:
            self.close()

    async def _run_one(self, work: _Work) -> None:
        try:
            await self._faults.reached("serve/prefill" if work.num_rows > 1 else "serve/decode")
            await self.connection.room()
            if work.passes_on and self._next is not None:
                await self._forwarder.room(self._next.peer_id)
            pick = await self._engine_pick(work)
            async with self.lock:
                done = await self.sequence.step(work.x, _engine_want(work), pick)
            if done.token is not None and self.sampler is not None:
                self.sampler.drew(done.token.token_id)
        finally:
            self._backpressure.give_back(self.client, work.x.nbytes)
        spent_ms = min(done.compute_ms, limits.MAX_STEP_MS), min(done.queue_ms, limits.MAX_STEP_MS)
        rows, codec_error = None, 0.0
        if done.output is not None:
            rows, codec_error = rows_of(done.output, "raw" if self.is_last else self._opened.codec)
        if work.passes_on and rows is not None and self._next is not None:
            await self._faults.reached("serve/push")
            self._push(work, rows, self._next, spent_ms)
        num_links = self._num_links
        await self._faults.reached("serve/reply")
        self._answered = work.position + work.num_rows
        looped, push_failed = False, work.passes_on and self._is_cut_off
        if done.token is not None and work.draw is not None and work.draw.ahead:
            # nothing comes between this and telling the client, which relies on that
            num_links = self._num_links
            looped = self._loop(self._answered, done.token.token_id, work.draw)
            push_failed = not looped and self._is_cut_off
        result = StepResult(
            sequence_id=self.sequence_id,
            position=self._answered,
            compute_ms=spent_ms[0],
            queue_ms=spent_ms[1],
            batch_size=done.batch_size,
            push_failed=push_failed,
            codec_error=codec_error,
            token=None if done.token is None else _sent(done.token),
            rows=rows,
            # a token on its way through the middle: the client waits for what the last server makes of it
            passed_on=work.passes_on and self._next is not None and work.num_rows == 1,
            looped=looped,
            num_links=num_links,
            upstream_ms=work.upstream_ms if self.is_last else (),
        )
        self._results.tell(result, can_wait=result.passed_on and not self.is_leaving)

    async def _engine_pick(self, work: _Work) -> Pick | None:
        if work.draw is None or not self.is_last:
            return None
        edits = None if self.sampler is None else await self.sampler.edits(work.draw.index)
        return _meant(work.draw, edits)

    def _push(self, work: _Work, rows: Rows, to: SequenceRef, spent_ms: Spent) -> None:
        frame = Push(
            client_peer_id=self.client,
            sequence_id=to.sequence_id,
            position=work.position,
            want=work.want,
            draw=work.draw,
            rows=rows,
            source_id=self.sequence_id,
            upstream_ms=(*work.upstream_ms, spent_ms)[-limits.MAX_UPSTREAM :] if work.num_rows == 1 else (),
        )
        try:
            self._forwarder.push(to.peer_id, frame)
        except SwarmError as error:
            logger.debug("%s takes no pushes: %s", to.peer_id, error)
            self._link(None)
            self._is_cut_off = True

    def _loop(self, position: int, token_id: int, draw: session_frames.TokenDraw) -> bool:
        """Give the first server the token that was drawn. False if that is left to the client."""
        to = self._next
        if to is None:
            return False
        frame = Push(
            client_peer_id=self.client,
            sequence_id=to.sequence_id,
            position=position,
            want="token",
            draw=replace(draw, index=draw.index + 1, ahead=draw.ahead - 1),
            rows=Rows(codec=TOKENS, num_rows=1, num_columns=0, payload=token_id.to_bytes(4, "little")),
            source_id=self.sequence_id,
        )
        try:
            if to == self._own:
                self._take(frame, frame.rows, passes_on=False)
            elif self._forwarder.is_open(to.peer_id):
                self._forwarder.push(to.peer_id, frame)
            else:
                self._is_cut_off = not self._forwarder.is_coming(to.peer_id)
                return False
        except SwarmError as error:
            logger.debug("a token is left to the client: %s", error)
            return False
        return True

    def _push_failed(self, error: SwarmError, *, is_linked: bool) -> None:
        """The next server has refused a push, or has gone. The client feeds it, or replaces it."""
        self._num_refused += 1
        if not is_linked or self._num_refused >= MAX_REFUSED:
            self._link(None)
            self._is_cut_off = True
        if self._answered is None or self.is_closed or self.connection.error is not None:
            return
        logger.debug("a push was lost: %s", error)
        self._results.flush()
        failed = StepResult(
            sequence_id=self.sequence_id, position=self._answered, push_failed=True, num_links=self._num_links
        )
        self.connection.send(failed)

    # --- its end ----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The client is to go elsewhere, and must have everything at once for that."""
        self.is_leaving = True
        self._results.flush()

    def end(self, error: BaseException) -> None:
        """Free it and tell the client. Idempotent."""
        if self.is_closed:
            return
        if self.connection.error is None:
            self.connection.send(SequenceEnded(sequence_id=self.sequence_id, failure=encode_failure(error)))
        self.close()

    def close(self) -> None:
        """Free it. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.sampler is not None:
            self.sampler.close()
        self._results.close()
        self.sequence.close()
        self._link(None)
        for work in self._inbox:
            self._backpressure.give_back(self.client, work.x.nbytes)
        self._inbox.clear()
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self._on_closed(self)


def refuse_push(push: Push, connection: MultiplexedConnection, error: SwarmError) -> None:
    """Tell the server that sent it."""
    connection.send(
        PushRefused(
            client_peer_id=push.client_peer_id,
            sequence_id=push.sequence_id,
            position=push.position,
            failure=encode_failure(error),
        )
    )


def _engine_want(work: _Work) -> Want:
    return Want.ALL if work.passes_on else _WANTS[work.want]


def _meant(draw: session_frames.TokenDraw, edits: LogitEdits | None) -> Pick:
    sampling = Sampling(
        temperature=draw.temperature, top_p=draw.top_p, top_k=draw.top_k, min_p=draw.min_p, seed=draw.seed
    )
    return Pick(sampling=sampling, index=draw.index, num_logprobs=draw.num_logprobs, edits=edits)


def _sent(token: Picked) -> session_frames.SampledToken:
    top = tuple((token_id, _within(logprob)) for token_id, logprob in token.top)
    logprob = None if token.logprob is None else _within(token.logprob)
    return session_frames.SampledToken(token_id=token.token_id, logprob=logprob, top=top)


def _within(logprob: float) -> float:
    return max(logprob, -limits.MAX_LOGPROB)
