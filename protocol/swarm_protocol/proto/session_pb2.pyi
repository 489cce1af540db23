from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("open", "step", "link", "hand", "close", "ready", "result", "ended", "leaving", "push", "push_refused", "linked", "drawn", "committed", "draft_text", "room_freed")
    class Rows(_message.Message):
        __slots__ = ("codec", "num_rows", "num_columns")
        CODEC_FIELD_NUMBER: _ClassVar[int]
        NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
        NUM_COLUMNS_FIELD_NUMBER: _ClassVar[int]
        codec: str
        num_rows: int
        num_columns: int
        def __init__(self, codec: _Optional[str] = ..., num_rows: _Optional[int] = ..., num_columns: _Optional[int] = ...) -> None: ...
    class SequenceRef(_message.Message):
        __slots__ = ("peer_id", "sequence_id")
        PEER_ID_FIELD_NUMBER: _ClassVar[int]
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        peer_id: str
        sequence_id: bytes
        def __init__(self, peer_id: _Optional[str] = ..., sequence_id: _Optional[bytes] = ...) -> None: ...
    class TokenDraw(_message.Message):
        __slots__ = ("temperature", "top_p", "top_k", "seed", "index", "num_logprobs", "ahead", "min_p")
        TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
        TOP_P_FIELD_NUMBER: _ClassVar[int]
        TOP_K_FIELD_NUMBER: _ClassVar[int]
        SEED_FIELD_NUMBER: _ClassVar[int]
        INDEX_FIELD_NUMBER: _ClassVar[int]
        NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        AHEAD_FIELD_NUMBER: _ClassVar[int]
        MIN_P_FIELD_NUMBER: _ClassVar[int]
        temperature: float
        top_p: float
        top_k: int
        seed: int
        index: int
        num_logprobs: int
        ahead: int
        min_p: float
        def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., index: _Optional[int] = ..., num_logprobs: _Optional[int] = ..., ahead: _Optional[int] = ..., min_p: _Optional[float] = ...) -> None: ...
    class Grammar(_message.Message):
        __slots__ = ("kind", "text")
        KIND_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        kind: str
        text: str
        def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...
    class Sampler(_message.Message):
        __slots__ = ("presence_penalty", "frequency_penalty", "repetition_penalty", "prompt_ids", "bias_ids", "bias_values", "end_ids", "min_tokens", "grammar")
        PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
        FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
        REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
        PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
        BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
        BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
        END_IDS_FIELD_NUMBER: _ClassVar[int]
        MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
        GRAMMAR_FIELD_NUMBER: _ClassVar[int]
        presence_penalty: float
        frequency_penalty: float
        repetition_penalty: float
        prompt_ids: bytes
        bias_ids: _containers.RepeatedScalarFieldContainer[int]
        bias_values: _containers.RepeatedScalarFieldContainer[float]
        end_ids: _containers.RepeatedScalarFieldContainer[int]
        min_tokens: int
        grammar: Frame.Grammar
        def __init__(self, presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., prompt_ids: _Optional[bytes] = ..., bias_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., end_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., grammar: _Optional[_Union[Frame.Grammar, _Mapping]] = ...) -> None: ...
    class SampledToken(_message.Message):
        __slots__ = ("token_id", "logprob", "top_ids", "top_logprobs", "fingerprint")
        TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
        LOGPROB_FIELD_NUMBER: _ClassVar[int]
        TOP_IDS_FIELD_NUMBER: _ClassVar[int]
        TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
        token_id: int
        logprob: float
        top_ids: _containers.RepeatedScalarFieldContainer[int]
        top_logprobs: _containers.RepeatedScalarFieldContainer[float]
        fingerprint: bytes
        def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...
    class OpenSequence(_message.Message):
        __slots__ = ("sequence_id", "session_id", "revision", "start", "end", "max_tokens", "codec", "page_keys", "previous", "next", "take_over", "sampler", "grow_to", "may_skip")
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        SESSION_ID_FIELD_NUMBER: _ClassVar[int]
        REVISION_FIELD_NUMBER: _ClassVar[int]
        START_FIELD_NUMBER: _ClassVar[int]
        END_FIELD_NUMBER: _ClassVar[int]
        MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
        CODEC_FIELD_NUMBER: _ClassVar[int]
        PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
        PREVIOUS_FIELD_NUMBER: _ClassVar[int]
        NEXT_FIELD_NUMBER: _ClassVar[int]
        TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
        SAMPLER_FIELD_NUMBER: _ClassVar[int]
        GROW_TO_FIELD_NUMBER: _ClassVar[int]
        MAY_SKIP_FIELD_NUMBER: _ClassVar[int]
        sequence_id: bytes
        session_id: str
        revision: str
        start: int
        end: int
        max_tokens: int
        codec: str
        page_keys: bytes
        previous: Frame.SequenceRef
        next: Frame.SequenceRef
        take_over: Frame.SequenceRef
        sampler: Frame.Sampler
        grow_to: int
        may_skip: int
        def __init__(self, sequence_id: _Optional[bytes] = ..., session_id: _Optional[str] = ..., revision: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., max_tokens: _Optional[int] = ..., codec: _Optional[str] = ..., page_keys: _Optional[bytes] = ..., previous: _Optional[_Union[Frame.SequenceRef, _Mapping]] = ..., next: _Optional[_Union[Frame.SequenceRef, _Mapping]] = ..., take_over: _Optional[_Union[Frame.SequenceRef, _Mapping]] = ..., sampler: _Optional[_Union[Frame.Sampler, _Mapping]] = ..., grow_to: _Optional[int] = ..., may_skip: _Optional[int] = ...) -> None: ...
    class StepRequest(_message.Message):
        __slots__ = ("sequence_id", "position", "want", "forward", "draw", "rows")
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        POSITION_FIELD_NUMBER: _ClassVar[int]
        WANT_FIELD_NUMBER: _ClassVar[int]
        FORWARD_FIELD_NUMBER: _ClassVar[int]
        DRAW_FIELD_NUMBER: _ClassVar[int]
        ROWS_FIELD_NUMBER: _ClassVar[int]
        sequence_id: bytes
        position: int
        want: str
        forward: bool
        draw: Frame.TokenDraw
        rows: Frame.Rows
        def __init__(self, sequence_id: _Optional[bytes] = ..., position: _Optional[int] = ..., want: _Optional[str] = ..., forward: _Optional[bool] = ..., draw: _Optional[_Union[Frame.TokenDraw, _Mapping]] = ..., rows: _Optional[_Union[Frame.Rows, _Mapping]] = ...) -> None: ...
    class LinkUpdate(_message.Message):
        __slots__ = ("sequence_id", "previous", "next")
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        PREVIOUS_FIELD_NUMBER: _ClassVar[int]
        NEXT_FIELD_NUMBER: _ClassVar[int]
        sequence_id: bytes
        previous: Frame.SequenceRef
        next: Frame.SequenceRef
        def __init__(self, sequence_id: _Optional[bytes] = ..., previous: _Optional[_Union[Frame.SequenceRef, _Mapping]] = ..., next: _Optional[_Union[Frame.SequenceRef, _Mapping]] = ...) -> None: ...
    class AllowHandover(_message.Message):
        __slots__ = ("sequence_id", "to_peer_id")
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        TO_PEER_ID_FIELD_NUMBER: _ClassVar[int]
        sequence_id: bytes
        to_peer_id: str
        def __init__(self, sequence_id: _Optional[bytes] = ..., to_peer_id: _Optional[str] = ...) -> None: ...
    class AnswerTokens(_message.Message):
        __slots__ = ("sequence_id", "token_ids")
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        sequence_id: bytes
        token_ids: bytes
        def __init__(self, sequence_id: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...
    class DraftText(_message.Message):
        __slots__ = ("sequence_id", "token_ids")
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        sequence_id: bytes
        token_ids: bytes
        def __init__(self, sequence_id: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...
    class CloseSequence(_message.Message):
        __slots__ = ("sequence_id", "commit_to")
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        COMMIT_TO_FIELD_NUMBER: _ClassVar[int]
        sequence_id: bytes
        commit_to: int
        def __init__(self, sequence_id: _Optional[bytes] = ..., commit_to: _Optional[int] = ...) -> None: ...
    class SequenceReady(_message.Message):
        __slots__ = ("sequence_id", "max_step_tokens", "length")
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
        LENGTH_FIELD_NUMBER: _ClassVar[int]
        sequence_id: bytes
        max_step_tokens: int
        length: int
        def __init__(self, sequence_id: _Optional[bytes] = ..., max_step_tokens: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...
    class StepResult(_message.Message):
        __slots__ = ("sequence_id", "position", "compute_ms", "queue_ms", "batch_size", "push_failed", "codec_error", "token", "rows", "passed_on", "upstream_ms", "looped", "num_links", "drafted", "num_drafts")
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        POSITION_FIELD_NUMBER: _ClassVar[int]
        COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
        QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
        BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
        PUSH_FAILED_FIELD_NUMBER: _ClassVar[int]
        CODEC_ERROR_FIELD_NUMBER: _ClassVar[int]
        TOKEN_FIELD_NUMBER: _ClassVar[int]
        ROWS_FIELD_NUMBER: _ClassVar[int]
        PASSED_ON_FIELD_NUMBER: _ClassVar[int]
        UPSTREAM_MS_FIELD_NUMBER: _ClassVar[int]
        LOOPED_FIELD_NUMBER: _ClassVar[int]
        NUM_LINKS_FIELD_NUMBER: _ClassVar[int]
        DRAFTED_FIELD_NUMBER: _ClassVar[int]
        NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
        sequence_id: bytes
        position: int
        compute_ms: float
        queue_ms: float
        batch_size: int
        push_failed: bool
        codec_error: float
        token: Frame.SampledToken
        rows: Frame.Rows
        passed_on: bool
        upstream_ms: _containers.RepeatedScalarFieldContainer[float]
        looped: bool
        num_links: int
        drafted: bool
        num_drafts: int
        def __init__(self, sequence_id: _Optional[bytes] = ..., position: _Optional[int] = ..., compute_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., batch_size: _Optional[int] = ..., push_failed: _Optional[bool] = ..., codec_error: _Optional[float] = ..., token: _Optional[_Union[Frame.SampledToken, _Mapping]] = ..., rows: _Optional[_Union[Frame.Rows, _Mapping]] = ..., passed_on: _Optional[bool] = ..., upstream_ms: _Optional[_Iterable[float]] = ..., looped: _Optional[bool] = ..., num_links: _Optional[int] = ..., drafted: _Optional[bool] = ..., num_drafts: _Optional[int] = ...) -> None: ...
    class LinkAck(_message.Message):
        __slots__ = ("sequence_id", "num_links", "position")
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        NUM_LINKS_FIELD_NUMBER: _ClassVar[int]
        POSITION_FIELD_NUMBER: _ClassVar[int]
        sequence_id: bytes
        num_links: int
        position: int
        def __init__(self, sequence_id: _Optional[bytes] = ..., num_links: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...
    class Commitment(_message.Message):
        __slots__ = ("sequence_id", "signed")
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        SIGNED_FIELD_NUMBER: _ClassVar[int]
        sequence_id: bytes
        signed: bytes
        def __init__(self, sequence_id: _Optional[bytes] = ..., signed: _Optional[bytes] = ...) -> None: ...
    class SequenceEnded(_message.Message):
        __slots__ = ("sequence_id", "failure")
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        FAILURE_FIELD_NUMBER: _ClassVar[int]
        sequence_id: bytes
        failure: bytes
        def __init__(self, sequence_id: _Optional[bytes] = ..., failure: _Optional[bytes] = ...) -> None: ...
    class ServerLeaving(_message.Message):
        __slots__ = ("within_s",)
        WITHIN_S_FIELD_NUMBER: _ClassVar[int]
        within_s: float
        def __init__(self, within_s: _Optional[float] = ...) -> None: ...
    class RoomFreed(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Push(_message.Message):
        __slots__ = ("client_peer_id", "sequence_id", "position", "want", "draw", "rows", "upstream_ms", "source_id", "num_drafts")
        CLIENT_PEER_ID_FIELD_NUMBER: _ClassVar[int]
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        POSITION_FIELD_NUMBER: _ClassVar[int]
        WANT_FIELD_NUMBER: _ClassVar[int]
        DRAW_FIELD_NUMBER: _ClassVar[int]
        ROWS_FIELD_NUMBER: _ClassVar[int]
        UPSTREAM_MS_FIELD_NUMBER: _ClassVar[int]
        SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
        NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
        client_peer_id: str
        sequence_id: bytes
        position: int
        want: str
        draw: Frame.TokenDraw
        rows: Frame.Rows
        upstream_ms: _containers.RepeatedScalarFieldContainer[float]
        source_id: bytes
        num_drafts: int
        def __init__(self, client_peer_id: _Optional[str] = ..., sequence_id: _Optional[bytes] = ..., position: _Optional[int] = ..., want: _Optional[str] = ..., draw: _Optional[_Union[Frame.TokenDraw, _Mapping]] = ..., rows: _Optional[_Union[Frame.Rows, _Mapping]] = ..., upstream_ms: _Optional[_Iterable[float]] = ..., source_id: _Optional[bytes] = ..., num_drafts: _Optional[int] = ...) -> None: ...
    class PushRefused(_message.Message):
        __slots__ = ("client_peer_id", "sequence_id", "position", "failure")
        CLIENT_PEER_ID_FIELD_NUMBER: _ClassVar[int]
        SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
        POSITION_FIELD_NUMBER: _ClassVar[int]
        FAILURE_FIELD_NUMBER: _ClassVar[int]
        client_peer_id: str
        sequence_id: bytes
        position: int
        failure: bytes
        def __init__(self, client_peer_id: _Optional[str] = ..., sequence_id: _Optional[bytes] = ..., position: _Optional[int] = ..., failure: _Optional[bytes] = ...) -> None: ...
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    HAND_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    PUSH_REFUSED_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TEXT_FIELD_NUMBER: _ClassVar[int]
    ROOM_FREED_FIELD_NUMBER: _ClassVar[int]
    open: Frame.OpenSequence
    step: Frame.StepRequest
    link: Frame.LinkUpdate
    hand: Frame.AllowHandover
    close: Frame.CloseSequence
    ready: Frame.SequenceReady
    result: Frame.StepResult
    ended: Frame.SequenceEnded
    leaving: Frame.ServerLeaving
    push: Frame.Push
    push_refused: Frame.PushRefused
    linked: Frame.LinkAck
    drawn: Frame.AnswerTokens
    committed: Frame.Commitment
    draft_text: Frame.DraftText
    room_freed: Frame.RoomFreed
    def __init__(self, open: _Optional[_Union[Frame.OpenSequence, _Mapping]] = ..., step: _Optional[_Union[Frame.StepRequest, _Mapping]] = ..., link: _Optional[_Union[Frame.LinkUpdate, _Mapping]] = ..., hand: _Optional[_Union[Frame.AllowHandover, _Mapping]] = ..., close: _Optional[_Union[Frame.CloseSequence, _Mapping]] = ..., ready: _Optional[_Union[Frame.SequenceReady, _Mapping]] = ..., result: _Optional[_Union[Frame.StepResult, _Mapping]] = ..., ended: _Optional[_Union[Frame.SequenceEnded, _Mapping]] = ..., leaving: _Optional[_Union[Frame.ServerLeaving, _Mapping]] = ..., push: _Optional[_Union[Frame.Push, _Mapping]] = ..., push_refused: _Optional[_Union[Frame.PushRefused, _Mapping]] = ..., linked: _Optional[_Union[Frame.LinkAck, _Mapping]] = ..., drawn: _Optional[_Union[Frame.AnswerTokens, _Mapping]] = ..., committed: _Optional[_Union[Frame.Commitment, _Mapping]] = ..., draft_text: _Optional[_Union[Frame.DraftText, _Mapping]] = ..., room_freed: _Optional[_Union[Frame.RoomFreed, _Mapping]] = ...) -> None: ...

class AnswerCommitment(_message.Message):
    __slots__ = ("client_peer_id", "sequence_id", "model", "revision", "start", "end", "inputs_from", "inputs_to", "inputs_digest", "outputs_from", "outputs_to", "outputs_digest")
    CLIENT_PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FROM_FIELD_NUMBER: _ClassVar[int]
    INPUTS_TO_FIELD_NUMBER: _ClassVar[int]
    INPUTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FROM_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_TO_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    client_peer_id: str
    sequence_id: bytes
    model: str
    revision: str
    start: int
    end: int
    inputs_from: int
    inputs_to: int
    inputs_digest: bytes
    outputs_from: int
    outputs_to: int
    outputs_digest: bytes
    def __init__(self, client_peer_id: _Optional[str] = ..., sequence_id: _Optional[bytes] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., inputs_from: _Optional[int] = ..., inputs_to: _Optional[int] = ..., inputs_digest: _Optional[bytes] = ..., outputs_from: _Optional[int] = ..., outputs_to: _Optional[int] = ..., outputs_digest: _Optional[bytes] = ...) -> None: ...

class KvRequest(_message.Message):
    __slots__ = ("client_peer_id", "sequence_id", "start", "end")
    CLIENT_PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    client_peer_id: str
    sequence_id: bytes
    start: int
    end: int
    def __init__(self, client_peer_id: _Optional[str] = ..., sequence_id: _Optional[bytes] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class KvHeader(_message.Message):
    __slots__ = ("length",)
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    length: int
    def __init__(self, length: _Optional[int] = ...) -> None: ...
