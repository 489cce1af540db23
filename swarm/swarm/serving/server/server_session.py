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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from swarm_protocol import limits
from swarm_protocol.errors import PeerViolation, SwarmError
from swarm_protocol.failure_messages import encode_failure
from swarm_protocol.served_evidence_messages import AnswerCommitment
from swarm_protocol.session_frames import (
    AnswerTokens,
    DraftText,
    LinkAck,
    LinkUpdate,
    OpenSequence,
    Push,
    PushRefused,
    SequenceEnded,
    SequenceReady,
    Spent,
    StepRequest,
    StepResult,
)

from swarm.network.interface import FailpointHook, Network
from swarm.serving.engine.sequence import EngineSequence, StepOutput
from swarm.serving.model.batch import Want
from swarm.serving.server.answer_log import AnswerLog
from swarm.serving.server.deployment import Deployment
from swarm.serving.server.push_connections import PushConnections, SessionLink
from swarm.serving.server.session_queues import Backpressure, CheckedStep, ResultBatcher, SessionInbox
from swarm.serving.server.session_sampler import SessionDraws, SessionSampler
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
    """One session on this server. `draws` says how it draws tokens if it is of the last block. Peers in `may_take_over`
    may have its keys and values.

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
        self.draws = SessionDraws(sampler)
        self.previous = opened.previous
        self.is_closed = self.was_ended = False
        self._codec = opened.codec
        self._deployed = deployed
        self._services = services
        state = partial(
            AnswerCommitment,
            client_peer_id=self.client,
            sequence_id=self.sequence_id,
            model=services.model,
            revision=deployed.loaded.revision,
            start=sequence.blocks[0],
            end=sequence.blocks[1],
        )
        self.log = AnswerLog(state, sequence.shared_inputs)
        sequence.inputs_of = self.log.page
        self._inbox = SessionInbox(
            sequence,
            deployed.engine.span,
            opened.codec,
            services.backpressure,
            max_step_tokens=deployed.loaded.max_step_tokens,
            on_taken=self.log.took,
        )
        self._link = SessionLink(
            services.push_connections,
            sequence.sharer,
            opened.sequence_id,
            take_own=self._inbox.take,
            on_failed=self._push_failed,
        )
        self._results = ResultBatcher(connection)
        self._on_closed = on_closed
        sequence.on_ended = self.end
        self._link.set_next(opened.next)

    @property
    def is_last(self) -> bool:
        """Return whether this is the session of the model's last block."""
        return self.sequence.blocks[1] == self._deployed.engine.span.num_blocks

    @property
    def is_sending(self) -> bool:
        """Return whether rows of the session wait to be sent."""
        return self.connection.is_sending(("", self.sequence_id)) or self._link.is_sending

    def take_step(self, step: StepRequest) -> None:
        """Queue a step from the client. A step that breaks the rules ends the session."""
        try:
            if step.want == "token" and not (self.is_last or step.forward):
                raise PeerViolation("only the last block's output says which token comes next")
            self._inbox.take(step)
        except SwarmError as error:
            self.end(error)

    def take_push(self, push: Push, connection: MultiplexedConnection) -> None:
        """Queue a push that came over another server's `connection`. A wrong push is refused to that server."""
        try:
            named = self.previous
            if named is None or (connection.peer_id, push.source_id) != (named.peer_id, named.sequence_id):
                raise PeerViolation("the client did not name you as the previous server", peer_id=connection.peer_id)
            # a late push has more, and a step that is not done leaves others
            made = 0 if self.sequence.num_queued else len(self.draws.drafter.drafts)
            if self.is_last and push.num_drafts > made:
                push = replace(push, rows=push.rows.first(1 + made), num_drafts=made)
            self._inbox.take(push)
        except SwarmError as error:
            refuse_push(push, connection, error)

    def recall(self, drawn: AnswerTokens) -> None:
        """Set the answer's earlier tokens, which the client sent. Raises PeerViolation, which ends the client's
        connection."""
        if self.draws.sampler is None:
            raise PeerViolation("tokens of an answer for a session without a sampler", peer_id=self.client)
        self.draws.sampler.recall(drawn.token_ids)

    def draft_from(self, text: DraftText) -> None:
        """Take drafts from the client's text from now on. Raises PeerViolation, which ends the client's connection."""
        if not self.is_last:
            raise PeerViolation("a text for drafts, and this is not the last block", peer_id=self.client)
        token_ids = np.frombuffer(text.token_ids, dtype="<i4")
        check_ids(token_ids, self._deployed.engine.span.vocab_size)
        self.draws.drafter.begin(token_ids)

    def link(self, link: LinkUpdate) -> None:
        """Link the session to the neighbours that the client names."""
        self._results.flush()  # the client needs these results to feed a new next server
        self.previous = link.previous
        self._link.relink(link.next)
        ack = LinkAck(sequence_id=self.sequence_id, num_links=self._link.num_links, position=self._inbox.firm_length)
        self.connection.send(ack)

    def ready(self) -> None:
        """Accept steps from now on, and tell the client."""
        self._inbox.open()
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
        if output.tokens:
            await self._give_tokens(step, output, spent_ms)
        else:
            await self._give_rows(step, output, spent_ms)

    async def _give_rows(self, step: CheckedStep, output: StepOutput, spent_ms: Spent) -> None:
        """Push a step's outputs to the next server, and send the client a copy, or those that it wants."""
        rows, codec_error = None, 0.0
        if output.output is not None:
            rows, codec_error = rows_of(output.output, "raw" if self.is_last else self._codec)
            if step.forward and self._link.next is not None:
                await self._services.failpoints.reached("serve/push")
                self._link.push_rows(step, rows, spent_ms)
            self.log.gave(step.position + step.num_rows - rows.num_rows, rows)
        num_links = self._link.num_links
        await self._services.failpoints.reached("serve/reply")
        has_next = self._link.next is not None
        result = StepResult(
            sequence_id=self.sequence_id,
            position=step.position + step.num_rows,
            compute_ms=spent_ms[0],
            queue_ms=spent_ms[1],
            batch_size=output.batch_size,
            push_failed=step.forward and self._link.is_cut_off,
            codec_error=codec_error,
            rows=rows,
            # the client waits for no answer about a single token but the last server's
            passed_on=step.forward and has_next and step.is_decode,
            num_links=num_links,
            # if rows go back to the client, no other server reports the times of the servers before
            upstream_ms=() if has_next and not self.is_last else step.upstream_ms,
            num_drafts=step.num_drafts,
        )
        self._results.add(result)

    async def _give_tokens(self, step: CheckedStep, output: StepOutput, spent_ms: Spent) -> None:
        """Send the tokens that a step has yielded to the client, and push the last one to the first server, with
        drafts. The client relies on no wait between the two."""
        await self._services.failpoints.reached("serve/reply")
        draw, tokens, num_right = step.draw, output.tokens, len(output.tokens) - 1
        assert draw is not None
        drawn = [token.token_id for token in tokens]
        drafts = await self.draws.next_drafts(drawn, draw.ahead - len(tokens), output.batch_size)
        first = step.position + step.num_rows - step.num_drafts
        for index, token in enumerate(tokens):
            drawn_as = replace(draw, index=draw.index + index, ahead=0)
            self.log.drew(first - 1 + index, drawn_as, token, of_step=step.position)
        looped, push_failed = False, False
        if draw.ahead > num_right:
            following = replace(draw, index=draw.index + 1 + num_right, ahead=draw.ahead - 1 - num_right)
            self.draws.drafter.sends(drafts, asyncio.get_running_loop().time())
            looped = self._link.push_tokens(first + num_right, (drawn[-1], *drafts), following)
            push_failed = not looped and self._link.is_cut_off
            if not looped:
                self.draws.drafter.withdraw()
        upstream_ms = step.upstream_ms
        for index, token in enumerate(tokens):
            is_last = index == num_right
            result = StepResult(
                sequence_id=self.sequence_id,
                position=first + index,
                compute_ms=spent_ms[0],
                queue_ms=spent_ms[1],
                batch_size=output.batch_size,
                token=token,
                num_links=self._link.num_links,
                upstream_ms=upstream_ms,
                drafted=not is_last,
                looped=looped and is_last,
                push_failed=push_failed and is_last,
            )
            self._results.add(result)
            # one pass has yielded all of them, so its times are told once
            spent_ms, upstream_ms = (0.0, 0.0), tuple((0.0, 0.0) for _ in upstream_ms)

    def sign_answer(self, until: int) -> None:
        """Send waiting results, and then the commitment to the session's inputs and outputs before position `until`."""
        self._results.flush()
        self.connection.send(self.log.signed(self._services.network, until))

    async def _compute(self, step: CheckedStep) -> StepOutput:
        """Wait for room to send the rows of a prompt, then run the step. Raises SwarmError."""
        try:
            await self._services.failpoints.reached("serve/decode" if step.is_decode else "serve/prefill")
            if not step.is_decode:
                await self.connection.room()
                await self._link.room()
            pick = await self.draws.pick(step.draw, step.num_drafts) if step.draw and self.is_last else None
            async with self.lock:
                self.sequence.settle(step.position)
                want = Want.ALL if step.forward else _WANTS[step.want]
                output = await self.sequence.step(step.x, want, pick, num_drafts=step.num_drafts)
                if output.tokens:
                    self._keep_right_drafts(step, output)
            return output
        finally:
            self._inbox.finish(step)

    def _keep_right_drafts(self, step: CheckedStep, output: StepOutput) -> None:
        """Keep the drafts that were right, and forget the others."""
        length = step.position + step.num_rows - step.num_drafts + len(output.tokens) - 1
        self.sequence.settle(length)
        self._inbox.settle(length)
        drawn = [token.token_id for token in output.tokens]
        self.draws.drafter.drew(drawn, asyncio.get_running_loop().time())

    def _push_failed(self, error: SwarmError) -> None:
        """Report a lost push to the client, which feeds the next server itself, or replaces it."""
        told_until = self._results.told_until
        if told_until is None or self.is_closed or self.connection.error is not None:
            return
        logger.debug("a push was lost: %s", error)
        failed = StepResult(
            sequence_id=self.sequence_id, position=told_until, push_failed=True, num_links=self._link.num_links
        )
        self._results.add(failed)

    def leave(self) -> None:
        """Send every result at once from now on: the client needs them to move to another server."""
        self._results.flush(for_good=True)

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
        if self.draws.sampler is not None:
            self.draws.sampler.close()
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
