"""Tests of when a session's results are sent and in how many messages, and how many steps may wait."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from support.fuzzed_sessions import HIDDEN_SIZE, SPAN, HeldSequence, at_once
from swarm.serving.peer_shares import Sharer
from swarm.serving.server.session_queues import (
    MAX_WAITING,
    REPORT_S,
    Backpressure,
    ResultBatcher,
    SessionInbox,
    together,
)
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused, PeerUnreachable
from swarm_protocol.rows import Rows
from swarm_protocol.session_frames import StepRequest, StepResult, TokenDraw, WantedOutput

SEQUENCE_ID = b"s" * 16


class Told:
    """A connection that records what it was to send."""

    def __init__(self) -> None:
        self.error: PeerUnreachable | None = None
        self.results: list[StepResult] = []

    def send(self, frame: StepResult) -> None:
        self.results.append(frame)


def passed(position: int, **changes: object) -> StepResult:
    row = Rows(codec="raw", num_rows=1, num_columns=2, payload=bytes([position]) * 8)
    result = StepResult(
        sequence_id=SEQUENCE_ID, position=position, compute_ms=2.0, queue_ms=0.5, rows=row, passed_on=True
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def test_reports_that_can_wait_are_sent_together_in_time() -> None:
    async def scenario() -> None:
        connection = Told()
        batcher = ResultBatcher(connection)  # type: ignore[arg-type]
        for position in (5, 6, 7):
            batcher.add(passed(position, push_failed=position == 6, codec_error=position / 100))
        assert not connection.results
        await asyncio.sleep(REPORT_S)
        (told,) = connection.results
        assert told.rows is not None
        assert (told.position, told.rows.num_rows) == (7, 3)
        assert bytes(told.rows.payload) == b"\x05" * 8 + b"\x06" * 8 + b"\x07" * 8
        assert (told.compute_ms, told.queue_ms, told.push_failed, told.codec_error) == (6.0, 1.5, True, 0.07)
        await asyncio.sleep(2 * REPORT_S)
        assert len(connection.results) == 1

    virtual_time.run(scenario())


def test_reports_are_sent_at_once_and_in_order_when_a_client_waits() -> None:
    async def scenario() -> None:
        connection = Told()
        batcher = ResultBatcher(connection)  # type: ignore[arg-type]
        batcher.add(passed(5))
        batcher.add(passed(6))
        batcher.add(StepResult(sequence_id=SEQUENCE_ID, position=9))
        assert [(told.position, told.passed_on) for told in connection.results] == [(6, True), (9, False)]

    virtual_time.run(scenario())


def test_reports_of_tokens_that_take_long_are_sent_at_once() -> None:
    async def scenario() -> None:
        connection = Told()
        batcher = ResultBatcher(connection)  # type: ignore[arg-type]
        batcher.add(passed(5))
        await asyncio.sleep(1.5 * REPORT_S)
        batcher.add(passed(6))
        assert [told.position for told in connection.results] == [5, 6]
        batcher.add(passed(7))
        assert len(connection.results) == 2

    virtual_time.run(scenario())


def test_reports_are_bounded_in_number() -> None:
    async def scenario() -> None:
        connection = Told()
        batcher = ResultBatcher(connection)  # type: ignore[arg-type]
        for position in range(1, MAX_WAITING + 2):
            batcher.add(passed(position))
        assert [told.position for told in connection.results] == [MAX_WAITING]

    virtual_time.run(scenario())


def test_batcher_knows_what_it_has_told_without_drafts_and_keeps_no_rows_of_it() -> None:
    async def scenario() -> None:
        batcher = ResultBatcher(Told())  # type: ignore[arg-type]
        assert batcher.told_until is None
        rows = Rows(codec="raw", num_rows=3, num_columns=2, payload=bytes(24))
        batcher.add(passed(7, rows=rows, num_drafts=2))
        assert batcher.told_until == 5
        assert not any(isinstance(each, StepResult) for each in vars(batcher).values())

    virtual_time.run(scenario())


def test_reports_of_all_sessions_are_sent_at_the_same_time() -> None:
    async def scenario() -> None:
        clock, connections, times = asyncio.get_running_loop().time, [Told(), Told()], list[float]()
        for connection in connections:
            connection.send = lambda _: times.append(clock())  # type: ignore[method-assign]
            ResultBatcher(connection).add(passed(5))  # type: ignore[arg-type]
            await asyncio.sleep(REPORT_S / 4)
        await asyncio.sleep(REPORT_S)
        assert len(times) == 2
        assert times[0] == times[1]

    virtual_time.run(scenario())


@pytest.mark.parametrize("ending", ["closed", "connection over"])
def test_reports_of_ended_sessions_are_not_sent(ending: str) -> None:
    async def scenario() -> None:
        connection = Told()
        batcher = ResultBatcher(connection)  # type: ignore[arg-type]
        batcher.add(passed(5))
        if ending == "closed":
            batcher.close()
        else:
            connection.error = PeerUnreachable("the connection is closed")
        await asyncio.sleep(2 * REPORT_S)
        assert not connection.results

    virtual_time.run(scenario())


def test_together_returns_a_single_result_unchanged() -> None:
    assert together([passed(5)]) == passed(5)


def test_backlog_accepts_other_clients_when_one_sends_too_much() -> None:
    backlog = Backpressure(100)
    greedy, neighbour, another, third = (Sharer(n, p) for n, p in (("lan", "g"), ("lan", "n"), ("a", "a"), ("t", "t")))
    backlog.take(greedy, 30)
    backlog.take(greedy, 20)
    with pytest.raises(PeerRefused) as refused:
        backlog.take(greedy, 1)
    assert refused.value.retry_after_s > 0
    backlog.take(neighbour, 25)
    with pytest.raises(PeerRefused):
        backlog.take(neighbour, 1)
    backlog.take(another, 25)
    with pytest.raises(PeerRefused):
        backlog.take(third, 1)
    backlog.give_back(greedy, 20)
    backlog.take(third, 20)
    for client, num_bytes in ((greedy, 30), (neighbour, 25), (another, 25), (third, 20)):
        backlog.give_back(client, num_bytes)
    assert backlog.num_bytes == 0


def test_backlog_accepts_one_step_of_any_size() -> None:
    backlog = Backpressure(100)
    backlog.take(Sharer("a", "a"), 100)
    with pytest.raises(PeerRefused):
        backlog.take(Sharer("b", "b"), 1)


def test_backlog_resumes_a_waiting_client_once_half_of_its_share_is_free() -> None:
    async def main() -> None:
        backlog = Backpressure(100)
        backlog.take(Sharer("a", "a"), 26)
        await backlog.room("b")
        waiting = asyncio.create_task(backlog.room("a"))
        await asyncio.sleep(1)
        assert not waiting.done()
        backlog.give_back(Sharer("a", "a"), 1)
        await waiting
        backlog.take(Sharer("b", "b"), 30)
        crowded = asyncio.create_task(backlog.room("a"))
        await asyncio.sleep(1)
        assert not crowded.done()
        await backlog.room("c")
        backlog.give_back(Sharer("b", "b"), 30)
        await crowded

    virtual_time.run(main())


def test_together_leaves_out_drafts_that_a_later_result_replaces() -> None:
    rows = [Rows(codec="raw", num_rows=num, num_columns=1, payload=bytes([num]) * 4 * num) for num in (4, 3, 1)]
    results = [
        passed(8, rows=rows[0], num_drafts=3),  # positions 4 to 7
        passed(9, rows=rows[1], num_drafts=2),  # positions 6 to 8: the first draft was right
        passed(10, rows=rows[2]),  # position 9: both were
    ]
    joined = together(results)
    assert joined.rows is not None
    assert (joined.position, joined.num_drafts, joined.rows.num_rows) == (10, 0, 6)
    assert bytes(joined.rows.payload) == b"\x04" * 8 + b"\x03" * 12 + b"\x01" * 4
    joined = together(results[:2])
    assert joined.rows is not None
    assert (joined.position, joined.num_drafts, joined.rows.num_rows) == (9, 2, 5)


def inbox_of(*, max_step_tokens: int) -> tuple[SessionInbox, HeldSequence, Backpressure]:
    sequence, backpressure = HeldSequence(2, 0), Backpressure(2**20)
    inbox = SessionInbox(
        sequence,  # type: ignore[arg-type]
        SPAN,
        "raw",
        backpressure,
        max_step_tokens=max_step_tokens,
    )
    inbox.open()
    return inbox, sequence, backpressure


def request(position: int, num_rows: int, want: WantedOutput = "nothing") -> StepRequest:
    payload = b"".join(struct.pack("<f", position + row) * HIDDEN_SIZE for row in range(num_rows))
    return StepRequest(
        sequence_id=SEQUENCE_ID,
        position=position,
        want=want,
        draw=TokenDraw() if want == "token" else None,
        rows=Rows(codec="raw", num_rows=num_rows, num_columns=HIDDEN_SIZE, payload=payload),
    )


def test_rows_of_a_prompt_that_come_in_pieces_while_others_wait_are_run_at_once() -> None:
    inbox, sequence, backpressure = inbox_of(max_step_tokens=64)
    for position in range(0, 60, 3):
        inbox.take(request(position, 3))
    inbox.take(request(60, 3, "token"))
    assert sequence.num_queued == 1
    step = at_once(inbox.next())
    assert (step.position, step.num_rows, step.want, step.draw) == (0, 63, "token", TokenDraw())
    assert step.x[:, 0].tolist() == list(range(63))
    inbox.finish(step)
    assert (sequence.num_queued, backpressure.num_bytes) == (0, 0)


def test_pieces_of_a_prompt_are_copied_once_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger may send two rows at a time, and each copy takes the time of the server's loop."""
    inbox, _, _ = inbox_of(max_step_tokens=64)
    monkeypatch.setattr(torch, "cat", copied := Mock(wraps=torch.cat))
    for position in range(0, 64, 2):
        inbox.take(request(position, 2))
    step = at_once(inbox.next())
    assert copied.call_count == 0
    assert len(step.x) == 64
    assert copied.call_count == 1


def test_steps_that_want_an_output_or_are_too_long_together_stay_apart() -> None:
    inbox, _, _ = inbox_of(max_step_tokens=8)
    for position, num_rows, want in ((0, 5, "nothing"), (5, 4, "nothing"), (9, 2, "last"), (11, 2, "all")):
        inbox.take(request(position, num_rows, want))  # type: ignore[arg-type]
    steps = [at_once(inbox.next()) for _ in range(3)]
    assert [(step.position, step.num_rows, step.want) for step in steps] == [
        (0, 5, "nothing"),
        (5, 6, "last"),
        (11, 2, "all"),
    ]
