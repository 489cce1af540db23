"""What a peer is told about frames that cannot be read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from protocol.session_examples import SEQUENCE
from swarm_protocol import wire
from swarm_protocol.errors import PeerViolation
from swarm_protocol.frames import Frames
from swarm_protocol.proto import session_pb2
from swarm_protocol.session_frames import SampledToken, StepResult


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda result: result.upstream_ms.append(1.0), "upstream_ms has 1 numbers, which are no pairs"),
        (lambda result: result.token.top_ids.append(1), "1 top_ids, and 0 top_logprobs"),
        (lambda result: result.rows.MergeFrom(session_pb2.Frame.Rows(codec="raw", num_rows=1)), r"not .* in \[1, "),
    ],
    ids=["times", "likely tokens", "columns"],
)
def test_frame_that_cannot_be_read_is_refused_with_the_field(
    spoil: Callable[[session_pb2.Frame.StepResult], None], told: str
) -> None:
    whole = Frames((StepResult(sequence_id=SEQUENCE, position=1, token=SampledToken(token_id=9)),))
    message = session_pb2.Frames.FromString(whole.to_bytes()[5:])
    spoil(message.frames[0].result)
    with pytest.raises(PeerViolation, match=told):
        Frames.from_bytes(wire.encode_with_payloads(message, []))
