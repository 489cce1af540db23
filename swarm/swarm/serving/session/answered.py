"""What a session leaves for a spot check: the rows of its stages, and the last that their servers send of it.

Servers in the middle report their rows some at a time. When a sequence is closed its server sends the rows that it
still had, and then what it signs. `ClosedAnswer.finished` waits for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from swarm_protocol.errors import PeerViolation
from swarm_protocol.session_frames import Commitment, StepResult

from swarm.serving.checking.finished_answer import AnsweredSpan, Draw, FinishedAnswer

if TYPE_CHECKING:
    from swarm_protocol.rows import Data
    from swarm_protocol.session_frames import Frame

    from swarm.serving.session.known_servers import ClientConnection, ConnectionLost
    from swarm.serving.session.pipeline import Pipeline
    from swarm.serving.session.session_messages import SessionMessages
    from swarm.serving.session.stage import Stage
    from swarm.serving.session.trace import Trace

COMMIT_S = 20.0
"""A server signs at once, but its answer may come after much that it had to send before."""


class LastFrames:
    """What the server of a closed sequence still sends: `late` rows by the position after them, and its commitment.

    Nothing waits for longer than COMMIT_S.
    """

    def __init__(self) -> None:
        self.late: list[StepResult] = []
        self._signed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def listen(self, connection: ClientConnection, sequence_id: bytes) -> None:
        """Take what comes for the sequence, which has just been closed."""

        def end(signed: bytes) -> None:
            if not self._signed.done():
                timer.cancel()
                self._signed.set_result(signed)
                connection.detach(sequence_id)

        def take(message: Frame | ConnectionLost) -> None:
            if isinstance(message, StepResult):
                self.late.append(message)
            else:
                end(message.signed if isinstance(message, Commitment) else b"")

        if connection.is_over:
            self._signed.set_result(b"")
            return
        timer = asyncio.get_running_loop().call_later(COMMIT_S, lambda: end(b""))
        connection.attach(sequence_id, take)

    async def signed(self) -> bytes:
        """Wait for the commitment: no bytes if none came in time."""
        return await self._signed


class ClosedAnswer:
    """An answer that has ended: `finished` returns what there is to check of it.

    `last` are the last frames of the stages that can be checked; `draws` all tokens of the answer, one at least. The
    reports go into the request's `trace`.
    """

    def __init__(
        self,
        messages: SessionMessages,
        pipeline: Pipeline,
        draws: Sequence[Draw],
        last: Mapping[Stage, LastFrames],
        trace: Trace,
    ) -> None:
        self._was_replayed = bool(trace.replays)
        self._trace = trace
        self._messages = messages
        self._num_blocks = pipeline.num_blocks
        self._draws = draws
        self._last = last
        self._boundaries = {
            block: buffer.rows(0, buffer.length) if buffer.length else b"" for block, buffer in pipeline.buffers.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._boundaries.values()))

    async def finished(self) -> FinishedAnswer:
        """Wait for what the servers still send. The rows that they send late are checked as those of a session."""
        signed = {stage: await last.signed() for stage, last in self._last.items()}
        for stage, last in self._last.items():
            for result in last.late:
                self._add(stage, result)
        return FinishedAnswer(
            model=self._messages.model,
            codec=self._messages.codec,
            has_plain_draws=self._messages.sampler is None,
            was_replayed=self._was_replayed,
            spans=tuple(self._span(stage, signed[stage]) for stage in signed),
            on_report=lambda report: self._trace.checks.append(report.to_dict()),
        )

    def _add(self, stage: Stage, result: StepResult) -> None:
        try:
            rows: Data = self._messages.check_result(stage, result).rows
        except PeerViolation:
            return  # it lacks rows then, and is noted for that
        each = self._messages.row_bytes(stage.end)
        known = self._boundaries.get(stage.end, b"")
        first = result.position - len(rows) // each
        if rows and first <= len(known) // each:
            self._boundaries[stage.end] = known + bytes(rows[len(known) - first * each :])

    def _span(self, stage: Stage, signed: bytes) -> AnsweredSpan:
        num_rows = self._draws[-1].position + 1
        is_last = stage.end == self._num_blocks
        outputs = b"" if is_last else self._rows(stage.end, stage.outputs_from, num_rows)
        own = [each for each in self._draws if each.position >= stage.outputs_from] if is_last else []
        before = next((other.peer_id for other in self._last if other.end == (stage.start or self._num_blocks)), "")
        return AnsweredSpan(
            peer_id=stage.peer_id,
            previous_peer_id=before,
            start=stage.start,
            end=stage.end,
            sequence_id=stage.sequence_id,
            inputs=self._rows(stage.start, 0, num_rows),
            num_rows=num_rows,
            outputs=outputs,
            outputs_from=stage.outputs_from,
            draws=_last_in_a_row(own),
            signed=signed,
        )

    def _rows(self, block: int, start: int, end: int) -> bytes:
        each = self._messages.row_bytes(block)
        return bytes(self._boundaries.get(block, b"")[start * each : end * each])


def _last_in_a_row(draws: Sequence[Draw]) -> tuple[Draw, ...]:
    """Return the last draws at consecutive positions and of one temperature."""
    found = list(draws[-1:])
    for each in reversed(draws[:-1]):
        after = found[-1]
        if each.position != after.position - 1 or each.draw.temperature != after.draw.temperature:
            break
        found.append(each)
    return tuple(reversed(found))
