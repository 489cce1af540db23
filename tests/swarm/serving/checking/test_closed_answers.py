"""Tests of what a client collects from servers after an answer has ended, and the tolerance by which it judges them."""

from __future__ import annotations

import asyncio
import dataclasses
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support.plain_records import serve_record
from swarm.router.routing import Hop
from swarm.serving.checking.comparison import TOLERANCES
from swarm.serving.checking.finished_answer import AnsweredSpan, Draw, FinishedAnswer
from swarm.serving.checking.span_check import CheckContext, SpanInputs, _Comparison, check_span
from swarm.serving.checking.spot_checks import SpotCheckOptions, SpotChecks, dtype_of
from swarm.serving.model.shape import ModelShape
from swarm.serving.session.answered import COMMIT_S, LAST_S, ClosedAnswer
from swarm.serving.session.client_state import PrefixStore, SessionOptions
from swarm.serving.session.connection_pool import ConnectionLost
from swarm.serving.session.pipeline import Pipeline
from swarm.serving.session.session_messages import SessionMessages
from swarm.serving.session.stage import Stage
from swarm.serving.session.trace import Trace
from swarm.testing import virtual_time
from swarm.trust.reputation import Reputation
from swarm_protocol.envelope import seal_now
from swarm_protocol.errors import PeerRefused, PeerUnreachable
from swarm_protocol.failure_messages import encode_failure
from swarm_protocol.identity import Identity
from swarm_protocol.manifest_messages import manifest_revision
from swarm_protocol.rows import Rows
from swarm_protocol.served_evidence_messages import COMMITMENT_PURPOSE, AnswerCommitment, PositionDigests
from swarm_protocol.session_frames import (
    Commitment,
    LinkAck,
    SampledToken,
    SequenceEnded,
    ServerLeaving,
    StepResult,
    TokenDraw,
)

ID = bytes(16)
COLUMNS = 64
MODEL = ModelShape(name="m", revision="r", num_blocks=6, hidden_size=COLUMNS, vocab_size=256)
RECORD = serve_record(end=3, model="m", revision="r", num_blocks=6, free_kv_tokens=1)
SPAN = AnsweredSpan(
    peer_id="server",
    previous_peer_id="",
    start=0,
    end=3,
    sequence_id=ID,
    inputs=bytes(4 * 8),
    num_rows=8,
    outputs=np.ones((8, COLUMNS), "<f4").tobytes(),
    outputs_from=0,
    draws=(),
    signed=b"",
)
ANSWER = FinishedAnswer(model=MODEL, codec="raw", has_plain_draws=True, was_replayed=False, spans=(SPAN,))


class FakeConnection:
    """A connection that records who listens to it."""

    is_over = False

    def attach(self, _sequence_id: bytes, on_message: Callable[[Any], None]) -> None:
        self.take = on_message

    def detach(self, _sequence_id: bytes) -> None:
        self.take = lambda _message: None


def closed_answer(num_rows: int) -> tuple[ClosedAnswer, FakeConnection, Pipeline]:
    """Return an answer of `num_rows` positions. The client knows none of the rows at its middle boundary yet."""
    messages = SessionMessages(MODEL, PrefixStore(), SessionOptions(), session_id="s", max_tokens=1024)
    pipeline = Pipeline(6, messages.new_buffer, max_step_tokens=512)
    stages = [
        Stage(
            hop=Hop(peer_id=f"server {start}", start=start, end=start + 3, cost_ms=1.0, record=RECORD),
            sequence_id=ID,
            row_bytes=messages.row_bytes(start),
        )
        for start in (0, 3)
    ]
    pipeline.buffers.add(stage.start for stage in stages)
    pipeline.buffers[0].append(bytes(4 * num_rows))
    draws = [Draw(position=num_rows - 1, draw=TokenDraw(), token=SampledToken(token_id=1))]
    answer = ClosedAnswer(messages, pipeline, draws, stages[:1], Trace(model="m"))
    connection = FakeConnection()
    answer.last[stages[0]].listen(connection, ID)  # type: ignore[arg-type]
    return answer, connection, pipeline


def late(position: int, num_rows: int) -> StepResult:
    rows = Rows(codec="raw", num_rows=num_rows, num_columns=COLUMNS, payload=bytes(4 * COLUMNS * num_rows))
    return StepResult(sequence_id=ID, position=position, rows=rows)


async def span_of(answer: ClosedAnswer) -> AnsweredSpan:
    [span] = (await answer.finished()).spans
    return span


def test_closed_answer_keeps_bounded_memory_when_a_server_sends_rows_without_end() -> None:
    async def scenario() -> None:
        answer, connection, pipeline = closed_answer(8)
        tracemalloc.start()
        try:
            for index in range(400):
                connection.take(late(1 + index, 1))  # the answer has eight rows
                connection.take(late(512, 512))
                connection.take(late(1024, 512))
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept < 2**20, "100 MiB were sent"
        assert pipeline.buffers[3].length == 8
        connection.take(Commitment(sequence_id=ID, signed=b"signed"))
        span = await span_of(answer)
        assert len(span.outputs) == 8 * 4 * COLUMNS
        assert len(span.outputs) + len(span.inputs) == answer.num_bytes

    virtual_time.run(scenario())


@pytest.mark.parametrize(
    "between",
    [
        ServerLeaving(within_s=1.0),
        LinkAck(sequence_id=ID, num_links=1, position=8),
        SequenceEnded(sequence_id=ID, failure=encode_failure(PeerRefused("the server is leaving"))),
        StepResult(sequence_id=ID, position=8),
    ],
)
def test_closed_answer_waits_on_when_other_frames_come_before_the_commitment(between: Any) -> None:
    async def scenario() -> None:
        answer, connection, _ = closed_answer(8)
        connection.take(between)
        connection.take(late(8, 8))
        connection.take(Commitment(sequence_id=ID, signed=b"signed"))
        assert (await span_of(answer)).signed == b"signed"

    virtual_time.run(scenario())


def test_closed_answer_extends_the_deadline_when_a_slow_server_sends_a_new_row() -> None:
    async def scenario() -> None:
        answer, connection, _ = closed_answer(8)
        for position in (1, 2):
            await asyncio.sleep(COMMIT_S - 1)
            connection.take(late(position, 1))
        await asyncio.sleep(COMMIT_S - 1)
        connection.take(Commitment(sequence_id=ID, signed=b"signed"))
        assert (await span_of(answer)).signed == b"signed"

    virtual_time.run(scenario())


@pytest.mark.parametrize("what", ["lost", "slow", "silent", "ended"])
def test_check_is_unchecked_when_the_server_is_cut_off_and_disputed_when_it_stays_silent(what: str) -> None:
    async def scenario() -> None:
        answer, connection, _ = closed_answer(8)
        if what == "lost":
            connection.take(ConnectionLost(PeerUnreachable("gone")))
        elif what == "ended":
            connection.take(SequenceEnded(sequence_id=ID, failure=encode_failure(PeerUnreachable("gone"))))
        elif what == "slow":
            for position in range(1, 8):
                connection.take(late(position, 1))
                await asyncio.sleep(LAST_S / 7)
        finished = await answer.finished()
        report = await check_span(finished, finished.spans[0], context("float32"))
        expected = ("unchecked", "cut off") if what in ("lost", "slow") else ("disputed", "withheld")
        assert (report.result, report.reason) == expected

    virtual_time.run(scenario())


def context(dtype: str, results: Sequence[Any] = ()) -> CheckContext:
    """Return the context of a check in which servers "0", "1", … compute `results`."""

    async def recompute(peer_id: str, _inputs: SpanInputs) -> Any:
        return results[int(peer_id)]

    names = tuple(map(str, range(len(results))))
    return CheckContext(network_id="n", now=0.0, dtype=dtype, candidates=names, recompute=recompute)


def test_dtype_is_the_most_tolerant_when_servers_announce_different_ones() -> None:
    digest = b"d" * 32
    revision = manifest_revision(digest, "bfloat16")
    said = [dataclasses.replace(RECORD, dtype=dtype) for dtype in ("float32", "float32")]
    published = dataclasses.replace(RECORD, revision=revision, manifest=digest, dtype="float32")
    assert dtype_of("float32", revision, [said[0], published]) == "bfloat16"
    assert dtype_of("float32", "r", said) == "float32"
    assert dtype_of("bfloat16", "r", said) == "bfloat16", "a server must not fail because of what others claim"
    assert dtype_of("float32", "r", [*said, dataclasses.replace(RECORD, dtype="bfloat16")]) == "bfloat16"
    assert dtype_of("", "r", said) == ""
    assert dtype_of("float32", "r", [RECORD]) == ""
    assert TOLERANCES.keys() >= {"float32", "bfloat16", "float16", "int8", "int4"}


def test_server_of_unknown_weights_is_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.serving.checking.span_check.commitment_complaint", lambda *_: None)
    monkeypatch.setattr("swarm.serving.checking.span_check.evidence_of", lambda *_: b"")

    async def scenario() -> None:
        off = np.full((8, COLUMNS), 1.01)
        assert (await check_span(ANSWER, SPAN, context("float32", [off, off]))).named == "server"
        report = await check_span(ANSWER, SPAN, context("", [off, off]))
        assert (report.result, report.reason, report.outcomes) == ("unchecked", "no dtype", ())

    virtual_time.run(scenario())


@pytest.mark.parametrize(
    ("signed_from", "are_rounded_otherwise", "expected"),
    [
        (2, False, [("unchecked", "replayed"), ("disputed", "inputs")]),
        (3, False, [("unchecked", "alone")] * 2),
        (3, True, [("unchecked", "replayed"), ("failed", "commitment")]),
        (4, False, [("unchecked", "replayed"), ("disputed", "withheld")]),
    ],
)
def test_server_is_not_blamed_for_the_outputs_of_a_row_that_was_pushed_to_it_again(
    signed_from: int, are_rounded_otherwise: bool, expected: list[tuple[str, str]]
) -> None:
    """If two neighbours are replaced, the first one pushes a row whose output the client may have from the old second
    one. Then nobody can compare that output. `expected`: with a replaced server, and without one."""
    server, outputs = Identity(b"s" * 32), PositionDigests()
    rows = bytearray(SPAN.outputs[3 * 4 * COLUMNS :])
    rows[-1] ^= are_rounded_otherwise
    outputs.add_rows(3, bytes(rows), 4 * COLUMNS)
    inputs = PositionDigests()
    inputs.add_rows(0, SPAN.inputs, 4)
    stated = AnswerCommitment(
        client_peer_id=Identity(b"c" * 32).peer_id,
        sequence_id=ID,
        model="m",
        revision="r",
        start=0,
        end=3,
        inputs_from=0,
        inputs_to=8,
        inputs_digest=inputs.digest(8),
        outputs_from=signed_from,
        outputs_to=8,
        outputs_digest=outputs.digest(8),
    )
    signed = seal_now(
        server, "n", purpose=COMMITMENT_PURPOSE, subject="m", payload=stated.to_bytes(), now=1.0, lifetime_s=60.0
    )
    span = dataclasses.replace(SPAN, peer_id=server.peer_id, outputs_from=3, outputs=SPAN.outputs[768:], signed=signed)

    async def scenario() -> None:
        replayed, undisturbed = (dataclasses.replace(ANSWER, was_replayed=replayed) for replayed in (True, False))
        reports = [await check_span(answer, span, context("float32")) for answer in (replayed, undisturbed)]
        assert [(report.result, report.reason) for report in reports] == expected

    virtual_time.run(scenario())


def test_checker_is_not_named_when_only_rounding_differs() -> None:
    tolerance = TOLERANCES["float32"].after(3).median_row
    near, far = (np.full((8, COLUMNS), 1.0 + share * tolerance) for share in (0.6, 1.2))

    async def scenario() -> None:
        report = await _Comparison(ANSWER, SPAN, context("float32", [far, near])).run()
        assert (report.result, report.named) == ("disputed", "")
        report = await _Comparison(ANSWER, SPAN, context("float32", [3 * far, near])).run()
        assert (report.result, report.named) == ("passed", "0")

    virtual_time.run(scenario())


def test_checks_go_on_when_the_check_of_one_answer_raises() -> None:
    class Answer:
        """An answer that grows while it waits."""

        num_bytes = 10

        async def finished(self) -> FinishedAnswer:
            self.num_bytes *= 2
            raise RuntimeError("a defect")

    async def scenario() -> None:
        checks = SpotChecks(None, None, Reputation(), SpotCheckOptions(share=1.0))  # type: ignore[arg-type]
        for _ in range(2):
            assert checks.submit(Answer())
            async with asyncio.timeout(10):
                await checks.settled()
        assert checks._num_bytes == 0
        await checks.close()

    virtual_time.run(scenario())
