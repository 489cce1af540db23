"""Runs the server's side of one session: computes the steps that its client and the previous server send, in order, and
passes the results on.

A client that breaks the rules loses its session. A wrong push is refused to the server that sent it, and does not
change the session. `session_queues` checks and holds waiting steps and results, `push_connections` sends to the next
server, `answer_log` keeps what will be signed, the engine's sequence computes, and `connection_server` owns connections
and sessions. `run` is the task that owns a session.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from swarm_protocol import limits, session_frames
from swarm_protocol.errors import PeerRefused, PeerViolation, SwarmError
from swarm_protocol.failure_messages import encode_failure
from swarm_protocol.session_frames import (
    AnswerTokens,
    DraftText,
    LinkAck,
    LinkUpdate,
    OpenSequence,
    Push,
    PushRefused,
    SampledToken,
    SequenceEnded,
    SequenceReady,
    StepRequest,
    StepResult,
)

from swarm.network.interface import FailpointHook, Network
from swarm.serving.engine.engine import cheap_drafts
from swarm.serving.engine.sequence import EngineSequence, StepOutput
from swarm.serving.model.batch import Want
from swarm.serving.sampling.sampling import Pick
from swarm.serving.server.answer_log import AnswerLog
from swarm.serving.server.deployment import Deployment
from swarm.serving.server.drafter import Drafter
from swarm.serving.server.push_connections import PushConnections, SessionLink
from swarm.serving.server.session_queues import Backpressure, CheckedStep, ResultBatcher, SessionInbox
from swarm.serving.server.session_sampler import SessionSampler
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection
from swarm.serving.wire.tensor_stream import check_ids, rows_of

logger = logging.getLogger(__name__)

MAX_TAKERS = 16
"""Maximum servers among which a leaving server's blocks may be split."""

_WANTS = {"nothing": Want.NOTHING, "last": Want.LAST, "all": Want.ALL, "token": Want.NOTHING}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedServices:
    """Holds what all sessions of a server of `model` share. The `network` signs their inputs and outputs."""

    model: str
    network: Network
    push_connections: PushConnections
    backpressure: Backpressure
    failpoints: FailpointHook


class ServerSession:
    """One session on this server. Only the last block's session has a `sampler`. Peers in `may_take_over` may have its
    keys and values.

    `previous` is the sequence that may push to this one; `lock` is held during a step or a hand-over.
    """

    def __init__(
        self,
        connection: MultiplexedConnection,
        opened: OpenSequence,
        sequence: EngineSequence,
        deployed: Deployment,
        services: SharedServices,
        *,
        sampler: SessionSampler | None,
        on_closed: Callable[[], None],
    ) -> None:
        self.client = connection.peer_id
        self.sequence_id = opened.sequence_id
        self.sequence = sequence
        self.may_take_over: deque[str] = deque(maxlen=MAX_TAKERS)
        self.task: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()
        self.connection = connection
        self.sampler = sampler
        self.previous = opened.previous
        self.is_closed = self.was_ended = False
        self._codec = opened.codec
        self._deployed = deployed
        self._services = services
        self._log = AnswerLog(sequence.shared_inputs)
        sequence.inputs_of = self._log.page
        # without the session: the server may have ended it when its client asks
        self.signed = partial(
            self._log.signed,
            services.network,
            self.client,
            self.sequence_id,
            model=services.model,
            revision=deployed.loaded.revision,
            blocks=sequence.blocks,
        )
        self._inbox = SessionInbox(
            self.client,
            sequence,
            deployed.engine.span,
            opened.codec,
            services.backpressure,
            max_step_tokens=deployed.loaded.max_step_tokens,
            on_taken=self._log.took,
        )
        self._link = SessionLink(
            services.push_connections,
            self.client,
            opened.sequence_id,
            take_own=lambda push: self._take(push, forward=False),
            on_failed=self._push_failed,
        )
        self._drafter = Drafter()
        self._results = ResultBatcher(connection)
        self._answered: int | None = None
        self._is_ready = False
        self._is_leaving = False
        self._on_closed = on_closed
        sequence.on_ended = self.end
        self._link.set_next(opened.next)

    @property
    def is_last(self) -> bool:
        """Return whether this is the session of the model's last block."""
        return self.sequence.blocks[1] == self._deployed.engine.span.num_blocks

    def take_step(self, step: StepRequest) -> None:
        """Queue a step from the client. A step that breaks the rules ends the session."""
        try:
            if step.want == "token" and not (self.is_last or step.forward):
                raise PeerViolation("only the last block's output says which token comes next")
            self._take(step, forward=step.forward and not self.is_last)
        except SwarmError as error:
            self.end(error)

    def take_push(self, push: Push, connection: MultiplexedConnection) -> None:
        """Queue a push that came over another server's `connection`. A wrong push is refused to that server."""
        try:
            named = self.previous
            if named is None or (connection.peer_id, push.source_id) != (named.peer_id, named.sequence_id):
                raise PeerViolation("the client did not name you as the previous server", peer_id=connection.peer_id)
            # a late push has more, and a step that is not done leaves others
            made = 0 if self.sequence.num_queued else len(self._drafter.drafts)
            if self.is_last and push.num_drafts > made:
                push = replace(push, rows=push.rows.first(1 + made), num_drafts=made)
            self._take(push, forward=not self.is_last, upstream_ms=push.upstream_ms)
        except SwarmError as error:
            refuse_push(push, connection, error)

    def recall(self, drawn: AnswerTokens) -> None:
        """Set the answer's earlier tokens, which the client sent. Raises PeerViolation, which ends the client's
        connection."""
        if self.sampler is None:
            raise PeerViolation("tokens of an answer for a session without a sampler", peer_id=self.client)
        self.sampler.recall(drawn.token_ids)

    def draft_from(self, text: DraftText) -> None:
        """Take drafts from the client's text from now on. Raises PeerViolation, which ends the client's connection."""
        if not self.is_last:
            raise PeerViolation("a text for drafts, and this is not the last block", peer_id=self.client)
        token_ids = np.frombuffer(text.token_ids, dtype="<i4")
        check_ids(token_ids, self._deployed.engine.span.vocab_size)
        self._drafter.begin(token_ids.tolist())

    def link(self, link: LinkUpdate) -> None:
        """Link the session to the neighbours that the client names."""
        self._results.flush()  # the client needs these results to feed a new next server
        self.previous = link.previous
        self._link.relink(link.next)
        ack = LinkAck(sequence_id=self.sequence_id, num_links=self._link.num_links, position=self._inbox.firm_length)
        self.connection.send(ack)

    def _take(
        self, frame: StepRequest | Push, *, forward: bool, upstream_ms: tuple[session_frames.Spent, ...] = ()
    ) -> None:
        """Queue a frame's step. Raises PeerViolation, PeerRefused."""
        if not self._is_ready:
            raise PeerRefused("the session is not open yet", retry_after_s=1.0)
        self._inbox.take(frame, forward=forward, upstream_ms=upstream_ms)

    def ready(self) -> None:
        """Accept steps from now on, and tell the client."""
        self._is_ready = True
        ready = SequenceReady(
            sequence_id=self.sequence_id,
            max_step_tokens=self._deployed.loaded.max_step_tokens,
            length=self.sequence.length,
        )
        self.connection.send(ready)

    async def run(self, prepare: Callable[[], Awaitable[None]] | None) -> None:
        """Prepare the session, and run steps until it has ended. The client is told why, unless it ended the session
        itself."""
        try:
            if prepare is not None:
                await prepare()
                self.ready()
            while True:
                await self._run_step(await self._inbox.next())
        except SwarmError as error:
            self.end(error)
        except Exception as error:
            logger.exception("a session failed")
            self.end(error)
        finally:
            self.close()

    async def _run_step(self, step: CheckedStep) -> None:
        output = await self._compute(step)
        step = step.with_drafts(output.num_drafts)
        spent_ms = min(output.compute_ms, limits.MAX_STEP_MS), min(output.queue_ms, limits.MAX_STEP_MS)
        rows, codec_error = None, 0.0
        if output.output is not None:
            rows, codec_error = rows_of(output.output, "raw" if self.is_last else self._codec)
        if step.forward and rows is not None and self._link.next is not None:
            await self._services.failpoints.reached("serve/push")
            self._link.push_rows(step, rows, spent_ms)
        firm_end = step.position + step.num_rows - step.num_drafts
        if rows is not None and not output.tokens:
            self._log.gave(step.position + step.num_rows - rows.num_rows, rows)
        num_links = self._link.num_links
        await self._services.failpoints.reached("serve/reply")
        self._answered = firm_end
        # the client waits for no answer about a single token but the last server's
        is_forwarded_token = step.forward and self._link.next is not None and step.is_decode
        result = StepResult(
            sequence_id=self.sequence_id,
            position=step.position + step.num_rows,
            compute_ms=spent_ms[0],
            queue_ms=spent_ms[1],
            batch_size=output.batch_size,
            push_failed=step.forward and self._link.is_cut_off,
            codec_error=codec_error,
            rows=rows,
            passed_on=is_forwarded_token,
            num_links=num_links,
            # if rows go back to the client, no other server reports the times of the servers before
            upstream_ms=step.upstream_ms if self._link.next is None or self.is_last else (),
            num_drafts=0 if output.tokens else step.num_drafts,
        )
        if output.tokens and step.draw is not None:
            drafts = await self._next_drafts(output, step.draw.ahead - len(output.tokens))
            self._give_tokens(step, output.tokens, drafts, replace(result, position=firm_end))
        else:
            self._results.add(result, can_wait=is_forwarded_token and not self._is_leaving)

    async def _next_drafts(self, output: StepOutput, ahead: int) -> tuple[int, ...]:
        """Tell the sampler which tokens a step has yielded, and return the drafts to follow them."""
        # sequences of one pass here come to the next server together, where none sees the others' drafts
        most = self._drafter.room(min(ahead, cheap_drafts(output.batch_size)))
        guess = self._drafter.guess(most)
        if self.sampler is None:
            return guess
        return await self.sampler.drew([token.token_id for token in output.tokens], guess, most)

    def _give_tokens(
        self, step: CheckedStep, tokens: Sequence[SampledToken], drafts: tuple[int, ...], result: StepResult
    ) -> None:
        """Send the tokens that a step has yielded to the client, and push the last one to the first server, with
        drafts. The client relies on no wait between the two."""
        draw = step.draw
        assert draw is not None
        first, num_right = result.position, len(tokens) - 1
        for index, token in enumerate(tokens):
            drawn = replace(draw, index=draw.index + index, ahead=0)
            self._log.drew(first - 1 + index, drawn, token, of_step=step.position)
        self._answered = first + num_right
        looped, push_failed = False, False
        if draw.ahead > num_right:
            following = replace(draw, index=draw.index + 1 + num_right, ahead=draw.ahead - 1 - num_right)
            self._drafter.sends(drafts, asyncio.get_running_loop().time())
            looped = self._link.push_tokens(self._answered, (tokens[-1].token_id, *drafts), following)
            push_failed = not looped and self._link.is_cut_off
            if not looped:
                self._drafter.withdraw()
        without_times = replace(
            result, compute_ms=0.0, queue_ms=0.0, upstream_ms=tuple((0.0, 0.0) for _ in result.upstream_ms)
        )
        for index, token in enumerate(tokens):
            is_last = index == num_right
            given = replace(
                without_times if index else result,
                position=first + index,
                token=token,
                num_links=self._link.num_links,
                drafted=not is_last,
                looped=looped and is_last,
                push_failed=push_failed and is_last,
            )
            self._results.add(given, can_wait=False)

    def sign_answer(self, until: int) -> None:
        """Send waiting results, and then the commitment to the session's inputs and outputs before position `until`."""
        self._results.flush()
        self.connection.send(self.signed(until=until))

    async def _compute(self, step: CheckedStep) -> StepOutput:
        """Wait for room to send the result, then run the step. Raises SwarmError."""
        try:
            await self._services.failpoints.reached("serve/decode" if step.is_decode else "serve/prefill")
            await self.connection.room()
            if step.forward:
                await self._link.room()
            pick = await self._engine_pick(step, self._drafter.drafts[: step.num_drafts])
            async with self.lock:
                self.sequence.settle(step.position)
                want = Want.ALL if step.forward else _WANTS[step.want]
                output = await self.sequence.step(step.x, want, pick, num_drafts=step.num_drafts)
                if output.tokens:
                    self._note_drawn(step, [token.token_id for token in output.tokens])
            return output
        finally:
            self._inbox.finish(step)

    def _note_drawn(self, step: CheckedStep, token_ids: Sequence[int]) -> None:
        """Keep the drafts that were right, and forget the others."""
        length = step.position + step.num_rows - step.num_drafts + len(token_ids) - 1
        self.sequence.settle(length)
        self._inbox.settle(length)
        self._drafter.drew(token_ids, asyncio.get_running_loop().time())

    async def _engine_pick(self, step: CheckedStep, drafts: Sequence[int]) -> Pick | None:
        if step.draw is None or not self.is_last:
            return None
        if self.sampler is None:
            return Pick(step.draw, drafts=tuple((token_id, None) for token_id in drafts))
        edits = await self.sampler.edits(step.draw.index)
        return Pick(step.draw, edits, tuple(zip(drafts, self.sampler.edits_after(drafts), strict=True)))

    def _push_failed(self, error: SwarmError) -> None:
        """Report a lost push to the client, which feeds the next server itself, or replaces it."""
        if self._answered is None or self.is_closed or self.connection.error is not None:
            return
        logger.debug("a push was lost: %s", error)
        failed = StepResult(
            sequence_id=self.sequence_id, position=self._answered, push_failed=True, num_links=self._link.num_links
        )
        self._results.add(failed, can_wait=False)

    def leave(self) -> None:
        """Send every result at once from now on: the client needs them to move to another server."""
        self._is_leaving = True
        self._results.flush()

    def end(self, error: BaseException) -> None:
        """Send waiting results and the error to the client, and close the session. A second call does nothing."""
        if self.is_closed:
            return
        self.was_ended = True
        self._results.flush()
        if self.connection.error is None:
            self.connection.send(SequenceEnded(sequence_id=self.sequence_id, failure=encode_failure(error)))
        self.close()

    def close(self) -> None:
        """Free the session's resources. A second call does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.sampler is not None:
            self.sampler.close()
        self._results.close()
        self.sequence.close()
        self._link.set_next(None)
        self._inbox.close()
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self._on_closed()


def refuse_push(push: Push, connection: MultiplexedConnection, error: SwarmError) -> None:
    """Send the refusal of a push to the server that pushed."""
    connection.send(
        PushRefused(
            client_peer_id=push.client_peer_id,
            sequence_id=push.sequence_id,
            position=push.position,
            failure=encode_failure(error),
        )
    )
