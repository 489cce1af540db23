"""Examples of messages of multiplexed connections, with each frame in each of its forms."""

from __future__ import annotations

from typing import Any

from swarm_protocol.errors import PeerRefused
from swarm_protocol.failure_messages import encode_failure
from swarm_protocol.frames import Frames
from swarm_protocol.identity import Identity
from swarm_protocol.rows import Rows
from swarm_protocol.sampler import Grammar, Sampler
from swarm_protocol.served_evidence_messages import AnswerCommitment
from swarm_protocol.serving_messages import KvHeader, KvRequest
from swarm_protocol.session_frames import (
    AllowHandover,
    AnswerTokens,
    CloseSequence,
    Commitment,
    DraftText,
    LinkAck,
    LinkUpdate,
    OpenSequence,
    Push,
    PushRefused,
    RoomFreed,
    SampledToken,
    SequenceEnded,
    SequenceReady,
    SequenceRef,
    ServerLeaving,
    StepRequest,
    StepResult,
    TokenDraw,
)

SEQUENCE, OTHER_SEQUENCE = bytes(range(16)), bytes(range(16, 32))
PEER, OTHER_PEER = (Identity(bytes([number]) * 32).peer_id for number in (7, 8))
FAILURE = encode_failure(PeerRefused("full", retry_after_s=2.5))
TOKENS = Rows(codec="tokens", num_rows=3, num_columns=0, payload=bytes(range(12)))
PICK = TokenDraw(temperature=0.5, top_p=0.75, top_k=40, seed=-7, index=3, num_logprobs=2, min_p=0.25)


def hidden(codec: str, num_rows: int, num_bytes: int) -> Rows:
    """Return rows of 3 columns."""
    return Rows(codec=codec, num_rows=num_rows, num_columns=3, payload=bytes(range(num_bytes)))


def pushed(**fields: Any) -> Push:
    return Push(client_peer_id=PEER, sequence_id=SEQUENCE, source_id=OTHER_SEQUENCE, **fields)


EXAMPLES: tuple[object, ...] = (
    Frames(
        (
            StepRequest(sequence_id=SEQUENCE, position=0, want="nothing", forward=True, rows=TOKENS),
            StepRequest(sequence_id=OTHER_SEQUENCE, position=7, want="token", draw=PICK, rows=hidden("raw", 2, 24)),
            CloseSequence(sequence_id=SEQUENCE),
        )
    ),
    Frames(
        (OpenSequence(sequence_id=SEQUENCE, session_id="s-1", revision="1f00ba44", start=0, end=4, max_tokens=256),)
    ),
    Frames(
        (
            OpenSequence(
                sequence_id=SEQUENCE,
                session_id="s-1",
                revision="1f00ba44",
                start=4,
                end=8,
                max_tokens=256,
                codec="int8",
                page_keys=(SEQUENCE, OTHER_SEQUENCE),
                may_skip=16,
                previous=SequenceRef(peer_id=PEER, sequence_id=OTHER_SEQUENCE),
                next=SequenceRef(peer_id=OTHER_PEER, sequence_id=OTHER_SEQUENCE),
                take_over=SequenceRef(peer_id=PEER, sequence_id=OTHER_SEQUENCE),
            ),
            LinkUpdate(sequence_id=SEQUENCE),
            LinkUpdate(
                sequence_id=SEQUENCE,
                previous=SequenceRef(peer_id=PEER, sequence_id=OTHER_SEQUENCE),
                next=SequenceRef(peer_id=OTHER_PEER, sequence_id=OTHER_SEQUENCE),
            ),
            AllowHandover(sequence_id=SEQUENCE, to_peer_id=PEER),
        )
    ),
    Frames(
        (
            OpenSequence(
                sequence_id=SEQUENCE,
                session_id="s-1",
                revision="1f00ba44",
                start=4,
                end=8,
                max_tokens=256,
                sampler=Sampler(
                    presence_penalty=-0.5,
                    frequency_penalty=0.25,
                    repetition_penalty=1.25,
                    prompt_ids=bytes(range(8)),
                    bias_ids=(7, 9),
                    bias_values=(-100.0, 1.5),
                    end_ids=(1, 2),
                    grammar=Grammar(kind="json_schema", text="{}"),
                ),
            ),
            OpenSequence(
                sequence_id=OTHER_SEQUENCE,
                session_id="s-1",
                revision="1f00ba44",
                start=4,
                end=8,
                max_tokens=256,
                sampler=Sampler(end_ids=(1,), min_tokens=3),
            ),
            AnswerTokens(sequence_id=SEQUENCE, token_ids=bytes(range(12))),
            AnswerTokens(sequence_id=OTHER_SEQUENCE, token_ids=b""),
            DraftText(sequence_id=SEQUENCE, token_ids=bytes(range(8))),
        )
    ),
    Frames(
        (
            SequenceReady(sequence_id=SEQUENCE, max_step_tokens=512, length=32),
            StepResult(sequence_id=SEQUENCE, position=3, compute_ms=1.5, queue_ms=0.25, batch_size=4, push_failed=True),
            StepResult(sequence_id=SEQUENCE, position=4, codec_error=0.125, rows=hidden("bf16", 2, 12)),
            StepResult(sequence_id=SEQUENCE, position=6, compute_ms=3.0, passed_on=True, rows=hidden("raw", 1, 12)),
            StepResult(
                sequence_id=SEQUENCE, position=5, token=SampledToken(token_id=9), upstream_ms=((1.5, 0.25), (1.5, 0.25))
            ),
            StepResult(
                sequence_id=SEQUENCE,
                position=5,
                token=SampledToken(token_id=9, logprob=-0.5, top=((9, -0.5), (1, -2.0))),
            ),
            StepResult(sequence_id=SEQUENCE, position=5, token=SampledToken(token_id=9), looped=True, num_links=3),
            StepResult(sequence_id=SEQUENCE, position=6, token=SampledToken(token_id=9, fingerprint=bytes(range(16)))),
            StepResult(sequence_id=SEQUENCE, position=6, token=SampledToken(token_id=9), drafted=True),
            StepResult(sequence_id=SEQUENCE, position=9, passed_on=True, rows=hidden("raw", 3, 36), num_drafts=2),
            LinkAck(sequence_id=SEQUENCE, num_links=3, position=5),
            CloseSequence(sequence_id=SEQUENCE, commit_to=6),
            Commitment(sequence_id=SEQUENCE, signed=bytes(range(40))),
            SequenceEnded(sequence_id=SEQUENCE, failure=FAILURE),
            ServerLeaving(within_s=30.0),
            RoomFreed(),
        )
    ),
    Frames(
        (
            pushed(position=7, want="last", rows=hidden("int8", 2, 10)),
            pushed(position=9, want="token", draw=TokenDraw(ahead=40), rows=hidden("raw", 1, 12)),
            pushed(position=10, want="nothing", rows=hidden("raw", 1, 12), upstream_ms=((1.5, 0.25),)),
            pushed(position=9, want="token", draw=TokenDraw(ahead=40), rows=hidden("raw", 4, 48), num_drafts=3),
            PushRefused(client_peer_id=PEER, sequence_id=SEQUENCE, position=7, failure=FAILURE),
        )
    ),
    KvRequest(client_peer_id=PEER, sequence_id=SEQUENCE, start=2, end=6),
    KvHeader(length=77),
    AnswerCommitment(
        client_peer_id=PEER,
        sequence_id=SEQUENCE,
        model="tiny",
        revision="1f00ba44",
        start=2,
        end=6,
        inputs_from=16,
        inputs_to=40,
        inputs_digest=bytes(range(32)),
        outputs_from=32,
        outputs_to=40,
        outputs_digest=bytes(range(32, 64)),
    ),
)
