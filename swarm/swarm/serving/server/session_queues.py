"""Queues the steps that wait to be computed at a server's sessions, and the results that wait to be sent to the client.

Every frame is checked when it arrives, against the length that the session will have after the frames before it. A
frame that does not fit is not computed. Rows that have been run already are dropped: if a push is slow, the client
sends the same rows itself. `Backpressure` bounds the bytes of the steps of all sessions.

Results that the client waits for are sent at once, others several at a time: a server in the middle pushes its outputs
on, and the client needs its copy only if the next server dies. If each token's result was sent alone, the client and
both network daemons would wake up for it while the next server computes.

All of it is used in the server's event loop only.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerViolation
from swarm_protocol.rows import Rows
from swarm_protocol.session_frames import Push, Spent, StepRequest, StepResult, TokenDraw, WantedOutput
from torch import Tensor

from swarm.held_counts import HeldCounts
from swarm.serving.engine.compute import RunnableSpan
from swarm.serving.engine.sequence import EngineSequence
from swarm.serving.model.batch import is_decode
from swarm.serving.peer_shares import Sharer, byte_limits, over_limit
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection
from swarm.serving.wire.tensor_stream import hidden_of, tokens_of

MAX_INBOX = 16
"""Maximum steps that wait at one session: clients keep four chunks of a prompt in flight, and repeat some when a push
is slow."""

REPORT_S = 0.1
"""Maximum seconds that a result may wait. All sessions flush at the same moments, so that the results of a connection
go in one message. A session whose tokens take longer than this each sends them at once: no other result would join
them, and the client sees which server is slow."""

MAX_WAITING = 32
"""Maximum waiting results of a session. More within REPORT_S occur only for a prompt in small pieces."""


class Backpressure:
    """Bounds the bytes that wait to be computed: for all clients, for those of one provider's network at three quarters
    of that, and for one client at half.

    So clients that send faster than the server computes cannot get all others refused. Every client may have one step
    of any size waiting, if there is room. Readers of a client's frames wait for `room` first, which slows down such a
    client; only frames that arrived together, or as pushes of other servers, are refused. `num_bytes` is 0 when nothing
    waits.
    """

    def __init__(self, max_bytes: int) -> None:
        self._limits = byte_limits(max_bytes)
        self._held = HeldCounts[Sharer]()
        self._changed = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        return self._held.total()

    async def room(self, client: str) -> None:
        """Wait while the client uses more than half of its share, or uses some and all clients use more than half of
        the total."""
        while self._is_filling(client):
            self._changed.clear()
            await self._changed.wait()

    def _is_filling(self, client: str) -> bool:
        most, _, most_own = self._limits
        own = sum(num_bytes for sharer, num_bytes in self._held.items() if sharer.peer_id == client)
        return 2 * own > most_own or (own > 0 and 2 * self.num_bytes > most)

    def take(self, sharer: Sharer, num_bytes: int) -> None:
        """Count `num_bytes` that a client has sent. Raises PeerRefused if that is too much."""
        if over_limit(self._held.items(), sharer, num_bytes, self._limits):
            raise PeerRefused("too much waits at the server", remedy="send less at once", retry_after_s=1.0)
        self._held[sharer] += num_bytes

    def give_back(self, sharer: Sharer, num_bytes: int) -> None:
        self._held[sharer] -= num_bytes
        self._changed.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStep:
    """A step that fits the session. If `forward`, all its outputs are needed, by the client and by the next server. The
    last `num_drafts` rows are drafts.

    `upstream_ms` are the times that the servers before spent on it, as far as they are known. The rows are `x`, which
    came in `parts`.
    """

    position: int
    parts: tuple[Tensor, ...]
    num_rows: int
    want: WantedOutput
    draw: TokenDraw | None
    forward: bool
    upstream_ms: tuple[Spent, ...]
    num_drafts: int = 0

    @property
    def is_decode(self) -> bool:
        return is_decode(self.num_rows, self.num_drafts)

    @property
    def x(self) -> Tensor:
        return torch.cat(self.parts) if len(self.parts) > 1 else self.parts[0]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def joined(self, following: CheckedStep) -> CheckedStep:
        """Return one step for this one, which wants no output of its own, and the `following` one."""
        num_rows = self.num_rows + following.num_rows
        # the parts become one when the step is run: there may be hundreds, and each copy takes the loop's time
        return replace(following, position=self.position, parts=self.parts + following.parts, num_rows=num_rows)

    def with_drafts(self, num_drafts: int) -> CheckedStep:
        """Return the step with only the first `num_drafts` of its drafts."""
        if num_drafts == self.num_drafts:
            return self
        num_rows = self.num_rows - self.num_drafts + num_drafts
        return replace(self, parts=(self.x[:num_rows],), num_rows=num_rows, num_drafts=num_drafts)


class SessionInbox:
    """Queues the steps of one session on `span`, each of at most `max_step_tokens`.

    `length` is the session's length after all waiting steps. Hidden states arrive in `codec`. `on_taken` gets the
    accepted rows, each once, and their first position. Before `open`, steps are refused.

    `finish` releases the bytes of each step that `next` has returned; `close` drops the steps that still wait.
    """

    def __init__(
        self,
        sequence: EngineSequence,
        span: RunnableSpan,
        codec: str,
        backpressure: Backpressure,
        *,
        max_step_tokens: int,
        on_taken: Callable[[int, Rows], None] = lambda _position, _rows: None,
    ) -> None:
        self.length = 0
        self._is_open = False
        self._sequence = sequence
        self._span = span
        self._is_last = sequence.blocks[1] == span.num_blocks
        self._max_step_tokens = max_step_tokens
        self._codec = codec
        self._on_taken = on_taken
        self._backpressure = backpressure
        self._num_drafts = 0  # of the last step
        self._steps: deque[CheckedStep] = deque()
        self._arrived = asyncio.Event()

    def open(self) -> None:
        """Take steps from now on. The session begins after what its sequence holds, whoever sends the first rows."""
        self._is_open, self.length = True, self._sequence.length

    @property
    def firm_length(self) -> int:
        """The length without drafts, which the next step may replace."""
        return self.length - self._num_drafts

    def settle(self, length: int) -> None:
        """Record how many positions the session holds after the drafts of its last step were compared."""
        if not self._steps:
            self.length, self._num_drafts = length, 0

    def take(self, frame: StepRequest | Push) -> None:
        """Check a frame and queue its step. Raises PeerViolation, PeerRefused."""
        if not self._is_open:
            raise PeerRefused("the session is not open yet", retry_after_s=1.0)
        rows, position, num_drafts = frame.rows, frame.position, frame.num_drafts if isinstance(frame, Push) else 0
        num_run = min(rows.num_rows - num_drafts, self.firm_length - position)
        if num_run == rows.num_rows - num_drafts:
            return
        if num_run > 0:
            rows, position = rows.without(num_run), self.firm_length
        if position > self.length:
            raise PeerViolation(f"rows from position {position} on, and the session ends at {self.length}")
        if self._num_drafts and self._is_last:
            raise PeerViolation("rows beside drafts that this server has not compared yet")
        firm_end = position + rows.num_rows - num_drafts
        if num_drafts:
            num_drafts = min(num_drafts, self._sequence.room_for_drafts(firm_end), self._max_step_tokens - 1)
            rows = rows.first(firm_end - position + num_drafts)
        self._check_size(rows, position, frame.want)
        step = CheckedStep(
            position=position,
            parts=(),
            num_rows=rows.num_rows,
            want=frame.want,
            draw=frame.draw,
            forward=not self._is_last and (isinstance(frame, Push) or frame.forward),
            upstream_ms=frame.upstream_ms if isinstance(frame, Push) else (),
            num_drafts=num_drafts,
        )
        before = self._before(step)
        step = replace(step, parts=(self._decoded(rows),))
        self._backpressure.take(self._sequence.sharer, step.num_bytes)
        self.length, self._num_drafts = firm_end + num_drafts, num_drafts
        self._on_taken(position, rows)
        if before is not None:
            self._steps[-1] = before.joined(step)
            return
        self._steps.append(step)
        self._sequence.num_queued += 1
        self._arrived.set()

    def _before(self, step: CheckedStep) -> CheckedStep | None:
        """Return the waiting step that a new one can join, if there is one: a sender cuts the rows of a prompt on a
        slow line, and they are run faster at once. A single row is a token, and drafts follow one.

        Raises PeerViolation if there is none, and too many steps wait."""
        last = self._steps[-1] if self._steps else None
        if last is not None and step.num_rows > 1 and step.want != "all" and not step.num_drafts:
            is_alike = last.want == "nothing" and not last.is_decode and last.forward == step.forward
            if is_alike and last.num_rows + step.num_rows <= self._max_step_tokens:
                return last
        if len(self._steps) >= MAX_INBOX:
            raise PeerViolation(f"more than {MAX_INBOX} steps at once")
        return None

    async def next(self) -> CheckedStep:
        while not self._steps:
            self._arrived.clear()
            await self._arrived.wait()
        return self._steps.popleft()

    def finish(self, step: CheckedStep) -> None:
        """Release the bytes of a step that was computed or failed."""
        self._sequence.num_queued -= 1
        self._backpressure.give_back(self._sequence.sharer, step.num_bytes)

    def close(self) -> None:
        for step in self._steps:
            self.finish(step)
        self._steps.clear()

    def _check_size(self, rows: Rows, position: int, want: str) -> None:
        num_rows, span = rows.num_rows, self._span
        if num_rows > self._max_step_tokens:
            raise PeerViolation(f"a step of {num_rows} tokens, and this server takes {self._max_step_tokens}")
        if position + num_rows > self._sequence.max_tokens:
            raise PeerViolation(
                f"{position + num_rows} tokens, and the session has at most {self._sequence.max_tokens}"
            )
        if self._is_last and want == "all" and 4 * num_rows * span.vocab_size > limits.MAX_MESSAGE_BYTES // 2:
            raise PeerViolation(f"the logits of {num_rows} tokens are too large for one message")

    def _decoded(self, rows: Rows) -> Tensor:
        if self._sequence.blocks[0] == 0:
            return tokens_of(rows, self._span.vocab_size)
        return hidden_of(rows, self._codec, self._span.hidden_size)


class ResultBatcher:
    """Sends results to the client at the other end of `connection`. Those of tokens that were passed on are sent at the
    next multiple of REPORT_S. `told_until` is the position of the newest result without its drafts, None before the
    first. The result itself is not kept, since its rows may take megabytes."""

    def __init__(self, connection: MultiplexedConnection) -> None:
        self.told_until: int | None = None
        self._connection = connection
        self._may_wait = True
        self._waiting: list[StepResult] = []
        self._timer: asyncio.TimerHandle | None = None
        self._added_s = math.inf

    def add(self, result: StepResult) -> None:
        """Send a result at once, or later if its token was passed on, in the order of the calls. Nothing is sent once
        the connection has ended."""
        if not result.passed_on:
            self.flush()
        self.told_until = result.position - result.num_drafts
        self._waiting.append(result)
        loop = asyncio.get_running_loop()
        now_s, before_s = loop.time(), self._added_s
        self._added_s = now_s
        can_wait = result.passed_on and self._may_wait and now_s - before_s <= REPORT_S
        if not can_wait or len(self._waiting) >= MAX_WAITING:
            self.flush()
        elif len(self._waiting) == 1:
            self._timer = loop.call_at((math.floor(now_s / REPORT_S) + 1) * REPORT_S, self.flush)

    def flush(self, *, for_good: bool = False) -> None:
        """Send the results that wait. If `for_good`, all later ones are sent at once."""
        self._may_wait = self._may_wait and not for_good
        waiting = self._waiting
        self.close()
        if waiting and self._connection.error is None:
            self._connection.send(together(waiting))

    def close(self) -> None:
        """Drop the results that wait."""
        self._waiting = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def together(results: Sequence[StepResult]) -> StepResult:
    """Join results of one session, each for a single token that was passed on, with drafts. Each result forgets the
    drafts that it replaces."""
    last = results[-1]
    if len(results) == 1:
        return last
    parts, end = list[Rows](), last.position
    for result in reversed(results):
        if result.rows is not None:
            first = result.position - result.rows.num_rows
            parts.insert(0, result.rows.first(min(result.position, end) - first))
            end = first
    rows = Rows(
        codec=parts[0].codec,
        num_rows=sum(part.num_rows for part in parts),
        num_columns=parts[0].num_columns,
        payload=b"".join(part.payload for part in parts),
    )
    return replace(
        last,
        rows=rows,
        compute_ms=sum(result.compute_ms for result in results),
        queue_ms=sum(result.queue_ms for result in results),
        push_failed=any(result.push_failed for result in results),
        codec_error=max(result.codec_error for result in results),
    )
