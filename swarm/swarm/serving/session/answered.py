"""Collects the data of an ended session for a spot check: the rows of its stages, and the last frames that their
servers send.

Servers in the middle report their rows in several messages. When a sequence is closed, its server sends the remaining
rows and then its signed commitment. `ClosedAnswer.finished` waits for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from swarm_protocol.errors import PeerViolation
from swarm_protocol.session_frames import Commitment, StepResult

from swarm.serving.checking.finished_answer import AnsweredSpan, Draw, FinishedAnswer
from swarm.serving.session.connection_pool import ConnectionLost

if TYPE_CHECKING:
    from swarm_protocol.session_frames import Frame

    from swarm.serving.session.connection_pool import ClientConnection
    from swarm.serving.session.pipeline import Pipeline
    from swarm.serving.session.session_messages import SessionMessages
    from swarm.serving.session.stage import Stage
    from swarm.serving.session.trace import Trace

COMMIT_S = 20.0
"""Seconds to wait for a server's commitment after its last new row: a server signs at once, but may have much to send
before that."""

LAST_S = 60.0
"""Maximum seconds for everything that a server still sends: checks of other answers wait for it."""


class LastFrames:
    """Receives what the server of a closed sequence still sends: rows, and then its commitment.

    `add` takes the rows, and returns whether some of them were new. The wait ends COMMIT_S after the last new rows, and
    after LAST_S in any case. `signed` is the commitment, or empty bytes if none arrived in time. `was_cut_off` is set
    if the connection ended, or rows were still arriving when the time was over.
    """

    def __init__(self, add: Callable[[StepResult], bool]) -> None:
        self.was_cut_off = False
        self._add = add
        self.signed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def listen(self, connection: ClientConnection, sequence_id: bytes) -> None:
        """Receive the frames of the sequence, which has just been closed."""

        if connection.is_over:
            self.was_cut_off = True
            self.signed.set_result(b"")
            return
        loop = asyncio.get_running_loop()
        last_s = loop.time() + LAST_S

        def end(signed: bytes, *, was_cut_off: bool = False) -> None:
            if not self.signed.done():
                timer.cancel()
                self.was_cut_off = was_cut_off
                self.signed.set_result(signed)
                connection.detach(sequence_id)

        def wait() -> asyncio.TimerHandle:
            due_s = loop.time() + COMMIT_S
            return loop.call_at(min(due_s, last_s), lambda: end(b"", was_cut_off=due_s > last_s))

        timer = wait()

        def take(message: Frame | ConnectionLost) -> None:
            nonlocal timer
            # other frames do not concern the commitment: a server that has just ended the sequence signs all the same
            match message:
                case StepResult():
                    if self._add(message):
                        timer.cancel()
                        timer = wait()
                case Commitment(signed=signed):
                    end(signed)
                case ConnectionLost():
                    end(b"", was_cut_off=True)

        connection.attach(sequence_id, take)


class ClosedAnswer:
    """An answer that has ended. `finished` returns the data to check it with.

    Its rows stay in the session's buffers, which do not change any more. `num_bytes` is the maximum that they take,
    late rows included.

    `last` receives the last frames of the `stages`, those that can be checked; `draws` are all tokens of the answer, at
    least one. Reports go into the request's `trace`.
    """

    def __init__(
        self,
        messages: SessionMessages,
        pipeline: Pipeline,
        draws: Sequence[Draw],
        stages: Iterable[Stage],
        trace: Trace,
    ) -> None:
        self.last = {stage: LastFrames(partial(self._add, stage)) for stage in stages}
        self._was_replayed = bool(trace.replays)
        self._trace = trace
        self._messages = messages
        self._num_blocks = pipeline.num_blocks
        self._draws = draws
        self._num_rows = draws[-1].position + 1
        self._buffers = dict(pipeline.buffers)
        self._drafted = pipeline.drafted
        self.num_bytes = sum(max(buffer.length, self._num_rows) * buffer.row_bytes for buffer in self._buffers.values())

    async def finished(self) -> FinishedAnswer:
        """Wait for what the servers still send. Late rows are validated like those of a running session."""
        signed = {stage: await last.signed for stage, last in self.last.items()}
        # in a thread, since it may copy much data
        return await asyncio.to_thread(self._answer, signed)

    def _answer(self, signed: Mapping[Stage, bytes]) -> FinishedAnswer:
        return FinishedAnswer(
            model=self._messages.model,
            codec=self._messages.codec,
            has_plain_draws=self._messages.sampler is None,
            was_replayed=self._was_replayed,
            spans=tuple(self._span(stage, signed[stage]) for stage in signed),
            on_report=lambda report: self._trace.checks.append(report.to_dict()),
        )

    def _add(self, stage: Stage, result: StepResult) -> bool:
        """Keep the rows of the answer that follow the known ones, and return whether there were any."""
        if (buffer := self._buffers.get(stage.end)) is None:
            return False
        known = buffer.length
        try:
            report = self._messages.check_result(stage, result).settled(self._num_rows, self._drafted, buffer.row_bytes)
            # servers may have run ahead of what the client asked for
            report = report.cut(min(report.position, self._num_rows), buffer.row_bytes)
            buffer.append_new(report.rows, report.position)
        except PeerViolation:
            return False  # then rows are missing, which the check reports
        return buffer.length > known

    def _span(self, stage: Stage, signed: bytes) -> AnsweredSpan:
        num_rows = self._num_rows
        is_last = stage.end == self._num_blocks
        outputs = b"" if is_last else self._rows(stage.end, stage.outputs_from, num_rows)
        own = [each for each in self._draws if each.position >= stage.outputs_from] if is_last else []
        before = next((other.peer_id for other in self.last if other.end == (stage.start or self._num_blocks)), "")
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
            was_cut_off=self.last[stage].was_cut_off,
            is_taken_over=stage.is_taken_over,
            begins_at=stage.opened.length if stage.opened else 0,
            dtype=stage.hop.record.dtype,
        )

    def _rows(self, block: int, start: int, end: int) -> bytes:
        if (buffer := self._buffers.get(block)) is None:
            return b""
        end = min(end, buffer.length)
        return buffer.rows(start, end) if start < end else b""


def _last_in_a_row(draws: Sequence[Draw]) -> tuple[Draw, ...]:
    """Return the last draws at consecutive positions and of one temperature."""
    found = list(draws[-1:])
    for each in reversed(draws[:-1]):
        after = found[-1]
        if each.position != after.position - 1 or each.draw.temperature != after.draw.temperature:
            break
        found.append(each)
    return tuple(reversed(found))
