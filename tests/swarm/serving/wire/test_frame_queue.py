"""The order in which frames of several sequences leave, and how frames of rows are cut."""

from __future__ import annotations

from typing import Any

import pytest
from swarm.serving.wire.multiplexed_connection import MESSAGE_BYTES, FrameQueue, cut
from swarm_protocol import limits
from swarm_protocol.frames import Frames
from swarm_protocol.identity import Identity
from swarm_protocol.rows import Rows
from swarm_protocol.session_frames import (
    AnswerTokens,
    CloseSequence,
    Frame,
    LinkAck,
    Push,
    ServerLeaving,
    StepRequest,
    StepResult,
    TokenDraw,
)

CLIENT, OTHER_CLIENT = (Identity(bytes([number]) * 32).peer_id for number in (1, 2))
COLUMNS = 256
ROW_BYTES = 4 * COLUMNS
CUT_BYTES = 16 * ROW_BYTES


def rows(num_rows: int, first: int = 0) -> Rows:
    payload = b"".join(bytes([(first + row) % 256]) * ROW_BYTES for row in range(num_rows))
    return Rows(codec="raw", num_rows=num_rows, num_columns=COLUMNS, payload=payload)


def sequence(number: int) -> bytes:
    return bytes([number]) * 16


def push(number: int, position: int, num_rows: int, **options: Any) -> Push:
    return Push(
        sequence_id=sequence(number),
        position=position,
        rows=rows(num_rows, position),
        source_id=sequence(9),
        **({"client_peer_id": CLIENT, "want": "nothing"} | options),
    )


def queue_of(*frames: Frame) -> FrameQueue:
    queue = FrameQueue()
    for frame in frames:
        queue.put(frame)
    return queue


def all_of(queue: FrameQueue, max_bytes: float = CUT_BYTES) -> list[list[Frame]]:
    messages = []
    while queue.num_frames:
        messages.append(queue.take(max_bytes))
    assert (queue.num_frames, queue.num_bytes) == (0, 0)
    return messages


def test_token_overtakes_the_rows_of_other_sequences() -> None:
    token = push(3, 7, 1, want="token", draw=TokenDraw())
    queue = queue_of(push(1, 0, 64), push(2, 0, 64), token)
    assert queue.take(CUT_BYTES)[0] == token


def test_frames_of_one_sequence_stay_in_order() -> None:
    acks = [LinkAck(sequence_id=sequence(1), num_links=number, position=0) for number in range(1, 5)]
    big, other = (StepResult(sequence_id=sequence(number), position=64, rows=rows(64)) for number in (1, 2))
    messages = all_of(queue_of(acks[0], big, acks[1], acks[2], other, acks[3]))
    order = [frame for message in messages for frame in message if frame.sequence_id == sequence(1)]  # type: ignore[union-attr]
    assert [frame for frame in order if isinstance(frame, LinkAck)] == acks
    assert order[0] == acks[0]
    assert order[-3:] == acks[1:]


def test_sequences_with_many_rows_take_turns() -> None:
    messages = all_of(queue_of(push(1, 0, 60), push(2, 0, 60)), 18 * ROW_BYTES)
    turns = [frame.sequence_id[0] for message in messages for frame in message]  # type: ignore[union-attr]
    assert turns[:5] == [1, 2, 1, 2, 1], "the last few rows of a sequence are small"
    assert sorted(turns) == [1] * 4 + [2] * 4


def test_small_frames_go_as_one_message_of_bounded_size() -> None:
    closes = [CloseSequence(sequence_id=sequence(number % 200)) for number in range(2 * limits.MAX_FRAMES)]
    first, *_ = all_of(queue_of(ServerLeaving(within_s=1.0), *closes))
    assert len(first) <= limits.MAX_FRAMES
    tokens = [StepResult(sequence_id=sequence(number), position=8, rows=rows(8)) for number in range(200)]
    for message in all_of(queue_of(*tokens)):
        assert len(Frames(tuple(message)).to_bytes()) <= MESSAGE_BYTES + 2**16


def test_rows_of_an_ended_sequence_do_not_hold_up_others() -> None:
    end, token, other = CloseSequence(sequence_id=sequence(1)), push(1, 128, 1), push(2, 0, 64)
    queue = queue_of(push(1, 0, 64), token, end, other, StepResult(sequence_id=sequence(1), position=64, rows=rows(64)))
    queue.forget_rows((CLIENT, sequence(1)))
    queue.forget_rows(("", sequence(1)))
    queue.forget_rows(("", sequence(5)))
    assert all_of(queue, 2**20) == [[token, end, other]]


def test_pushes_of_two_clients_that_chose_the_same_id_are_of_two_sequences() -> None:
    theirs, own = push(1, 0, 64, client_peer_id=OTHER_CLIENT), push(1, 0, 64)
    queue = queue_of(theirs, own)
    queue.forget_rows((OTHER_CLIENT, sequence(1)))
    assert ((OTHER_CLIENT, sequence(1)) in queue, (CLIENT, sequence(1)) in queue) == (False, True)
    assert all_of(queue, 2**20) == [[own]]


@pytest.mark.parametrize("kind", ["push", "step"])
def test_rows_of_a_prompt_are_cut_and_only_the_last_ones_draw(kind: str) -> None:
    whole: Frame = push(1, 100, 50, want="token", draw=TokenDraw(index=3))
    if kind == "step":
        whole = StepRequest(
            sequence_id=sequence(1),
            position=100,
            want="token",
            draw=TokenDraw(index=3),
            rows=rows(50, 100),
            forward=True,
        )
    parts = [frame for message in all_of(queue_of(whole)) for frame in message]
    assert [part.position for part in parts] == [100, 116, 132, 148]  # type: ignore[union-attr]
    assert [part.want for part in parts] == ["nothing"] * 3 + ["token"]  # type: ignore[union-attr]
    assert parts[-1].draw == TokenDraw(index=3)  # type: ignore[union-attr]
    assert b"".join(part.rows.payload for part in parts) == whole.rows.payload  # type: ignore[union-attr]


def test_rows_of_a_result_are_cut_and_their_time_is_told_once() -> None:
    whole = StepResult(sequence_id=sequence(1), position=150, compute_ms=8.0, queue_ms=2.0, rows=rows(50, 100))
    parts = [frame for message in all_of(queue_of(whole)) for frame in message]
    assert [part.position for part in parts] == [116, 132, 148, 150]  # type: ignore[union-attr]
    assert [part.compute_ms + part.queue_ms for part in parts] == [0.0, 0.0, 0.0, 10.0]  # type: ignore[union-attr]
    assert b"".join(part.rows.payload for part in parts) == whole.rows.payload  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "frame",
    [
        push(1, 100, 5, want="token", draw=TokenDraw(ahead=9), num_drafts=4),
        push(1, 100, 2),
        push(1, 100, 50, want="all"),
        StepResult(sequence_id=sequence(1), position=50, rows=rows(50), passed_on=True),
        StepResult(sequence_id=sequence(1), position=50),
        AnswerTokens(sequence_id=sequence(1), token_ids=bytes(4 * 50_000)),
    ],
)
def test_frames_that_are_one_thing_stay_whole(frame: Frame) -> None:
    assert cut(frame, 1) == (frame, None)
