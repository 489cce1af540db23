from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeRecord(_message.Message):
    __slots__ = ("name", "version", "addrs", "device", "memory_bytes", "free_memory_bytes", "reachability", "prefill_tokens_per_s", "decode_tokens_per_s", "training_tokens_per_s", "started_at", "state", "models", "runs", "role", "first_token_p50_s", "first_token_p95_s", "pause", "lends_again_at", "paths", "protocol_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    REACHABILITY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TRAINING_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_P50_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_P95_S_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    LENDS_AGAIN_AT_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    addrs: _containers.RepeatedScalarFieldContainer[str]
    device: str
    memory_bytes: int
    free_memory_bytes: int
    reachability: str
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    training_tokens_per_s: float
    started_at: float
    state: str
    models: _containers.RepeatedScalarFieldContainer[str]
    runs: _containers.RepeatedScalarFieldContainer[str]
    role: str
    first_token_p50_s: float
    first_token_p95_s: float
    pause: str
    lends_again_at: float
    paths: PathCounts
    protocol_version: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., addrs: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., free_memory_bytes: _Optional[int] = ..., reachability: _Optional[str] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ..., training_tokens_per_s: _Optional[float] = ..., started_at: _Optional[float] = ..., state: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., runs: _Optional[_Iterable[str]] = ..., role: _Optional[str] = ..., first_token_p50_s: _Optional[float] = ..., first_token_p95_s: _Optional[float] = ..., pause: _Optional[str] = ..., lends_again_at: _Optional[float] = ..., paths: _Optional[_Union[PathCounts, _Mapping]] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class PathCounts(_message.Message):
    __slots__ = ("direct", "dialled_back", "punched", "relayed")
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    DIALLED_BACK_FIELD_NUMBER: _ClassVar[int]
    PUNCHED_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    direct: int
    dialled_back: int
    punched: int
    relayed: int
    def __init__(self, direct: _Optional[int] = ..., dialled_back: _Optional[int] = ..., punched: _Optional[int] = ..., relayed: _Optional[int] = ...) -> None: ...

class ServeRecord(_message.Message):
    __slots__ = ("model", "revision", "num_blocks", "start", "end", "state", "prefill_ms_per_token", "decode_ms_per_block", "free_kv_tokens", "queue_depth", "rtt_ms", "relayed", "next_start", "next_end", "tokens_per_s", "source", "send_ms_per_token", "token_ms", "manifest", "dtype", "max_blocks")
    class RttMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TokenMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    NEXT_START_FIELD_NUMBER: _ClassVar[int]
    NEXT_END_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SEND_MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    num_blocks: int
    start: int
    end: int
    state: str
    prefill_ms_per_token: float
    decode_ms_per_block: float
    free_kv_tokens: int
    queue_depth: int
    rtt_ms: _containers.ScalarMap[str, float]
    relayed: bool
    next_start: int
    next_end: int
    tokens_per_s: float
    source: str
    send_ms_per_token: float
    token_ms: _containers.ScalarMap[str, float]
    manifest: bytes
    dtype: str
    max_blocks: int
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., num_blocks: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., state: _Optional[str] = ..., prefill_ms_per_token: _Optional[float] = ..., decode_ms_per_block: _Optional[float] = ..., free_kv_tokens: _Optional[int] = ..., queue_depth: _Optional[int] = ..., rtt_ms: _Optional[_Mapping[str, float]] = ..., relayed: _Optional[bool] = ..., next_start: _Optional[int] = ..., next_end: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., source: _Optional[str] = ..., send_ms_per_token: _Optional[float] = ..., token_ms: _Optional[_Mapping[str, float]] = ..., manifest: _Optional[bytes] = ..., dtype: _Optional[str] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("peer_id", "reason")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    reason: str
    def __init__(self, peer_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RoundReport(_message.Message):
    __slots__ = ("outer_step", "phases_s", "bytes_sent", "refused", "rates_from")
    class PhasesSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class RatesFromEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    PHASES_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RATES_FROM_FIELD_NUMBER: _ClassVar[int]
    outer_step: int
    phases_s: _containers.ScalarMap[str, float]
    bytes_sent: int
    refused: _containers.RepeatedCompositeFieldContainer[Refusal]
    rates_from: _containers.ScalarMap[str, float]
    def __init__(self, outer_step: _Optional[int] = ..., phases_s: _Optional[_Mapping[str, float]] = ..., bytes_sent: _Optional[int] = ..., refused: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., rates_from: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ValidationReport(_message.Message):
    __slots__ = ("outer_step", "loss")
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    outer_step: int
    loss: float
    def __init__(self, outer_step: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class TrainerRecord(_message.Message):
    __slots__ = ("run", "outer_step", "digest", "tokens_per_s", "loss", "state", "report", "num_parameters", "validation", "endorsed_step", "held_out_scores")
    class HeldOutScoresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    ENDORSED_STEP_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_SCORES_FIELD_NUMBER: _ClassVar[int]
    run: str
    outer_step: int
    digest: bytes
    tokens_per_s: float
    loss: float
    state: str
    report: RoundReport
    num_parameters: int
    validation: ValidationReport
    endorsed_step: int
    held_out_scores: _containers.ScalarMap[str, float]
    def __init__(self, run: _Optional[str] = ..., outer_step: _Optional[int] = ..., digest: _Optional[bytes] = ..., tokens_per_s: _Optional[float] = ..., loss: _Optional[float] = ..., state: _Optional[str] = ..., report: _Optional[_Union[RoundReport, _Mapping]] = ..., num_parameters: _Optional[int] = ..., validation: _Optional[_Union[ValidationReport, _Mapping]] = ..., endorsed_step: _Optional[int] = ..., held_out_scores: _Optional[_Mapping[str, float]] = ...) -> None: ...
