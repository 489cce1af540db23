"""What a peer is told about frames that cannot be read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from protocol.session_examples import SEQUENCE, hidden, pushed
from swarm_protocol import limits, wire
from swarm_protocol.errors import PeerViolation
from swarm_protocol.frames import Frames
from swarm_protocol.proto import session_pb2
from swarm_protocol.session_frames import DraftText, SampledToken, StepResult, TokenDraw


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda result: result.upstream_ms.append(1.0), "upstream_ms has 1 numbers, which are no pairs"),
        (lambda result: result.token.top_ids.append(1), "1 top_ids, and 0 top_logprobs"),
        (lambda result: setattr(result, "num_drafts", 1), "1 drafts without the row of the token before them"),
        (lambda result: setattr(result, "num_drafts", 16), "num_drafts is 16"),
        (lambda result: result.rows.MergeFrom(session_pb2.Frame.Rows(codec="raw", num_rows=1)), r"not .* in \[1, "),
    ],
    ids=["times", "likely tokens", "drafts", "many drafts", "columns"],
)
def test_frame_that_cannot_be_read_is_refused_with_the_field(
    spoil: Callable[[session_pb2.Frame.StepResult], None], told: str
) -> None:
    whole = Frames((StepResult(sequence_id=SEQUENCE, position=1, token=SampledToken(token_id=9)),))
    message = session_pb2.Frames.FromString(whole.to_bytes()[5:])
    spoil(message.frames[0].result)
    with pytest.raises(PeerViolation, match=told):
        Frames.from_bytes(wire.encode_with_payloads(message, []))


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_push_whose_drafts_do_not_follow_one_token_is_refused(num_drafts: int) -> None:
    whole = pushed(position=9, want="token", draw=TokenDraw(ahead=40), rows=hidden("raw", 3, 36), num_drafts=2)
    message = session_pb2.Frames.FromString(Frames((whole,)).to_bytes()[5 : -len(whole.rows.payload)])
    message.frames[0].push.num_drafts = num_drafts
    with pytest.raises(PeerViolation, match="drafts in 3 rows, which follow no single drawn token"):
        Frames.from_bytes(wire.encode_with_payloads(message, [whole.rows.payload]))


def test_text_for_drafts_is_bounded() -> None:
    assert DraftText(sequence_id=SEQUENCE, token_ids=bytes(4 * limits.MAX_DRAFT_TEXT_TOKENS))
    with pytest.raises(ValueError, match="token_ids"):
        DraftText(sequence_id=SEQUENCE, token_ids=bytes(4 * (limits.MAX_DRAFT_TEXT_TOKENS + 1)))
