from swarm_protocol.proto import records_pb2 as _records_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainingStatus(_message.Message):
    __slots__ = ("run", "outer_step", "num_outer_steps", "loss", "tokens_per_s", "waits_for", "waits_s", "slow_links", "convicted", "steps_left", "probation_steps", "endorsed_step", "endorses_other", "entered", "held_out", "other_history")
    RUN_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTER_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    WAITS_S_FIELD_NUMBER: _ClassVar[int]
    SLOW_LINKS_FIELD_NUMBER: _ClassVar[int]
    CONVICTED_FIELD_NUMBER: _ClassVar[int]
    STEPS_LEFT_FIELD_NUMBER: _ClassVar[int]
    PROBATION_STEPS_FIELD_NUMBER: _ClassVar[int]
    ENDORSED_STEP_FIELD_NUMBER: _ClassVar[int]
    ENDORSES_OTHER_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    OTHER_HISTORY_FIELD_NUMBER: _ClassVar[int]
    run: str
    outer_step: int
    num_outer_steps: int
    loss: float
    tokens_per_s: float
    waits_for: str
    waits_s: float
    slow_links: _containers.RepeatedScalarFieldContainer[str]
    convicted: _containers.RepeatedScalarFieldContainer[str]
    steps_left: int
    probation_steps: int
    endorsed_step: int
    endorses_other: bool
    entered: str
    held_out: str
    other_history: str
    def __init__(self, run: _Optional[str] = ..., outer_step: _Optional[int] = ..., num_outer_steps: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., waits_for: _Optional[str] = ..., waits_s: _Optional[float] = ..., slow_links: _Optional[_Iterable[str]] = ..., convicted: _Optional[_Iterable[str]] = ..., steps_left: _Optional[int] = ..., probation_steps: _Optional[int] = ..., endorsed_step: _Optional[int] = ..., endorses_other: _Optional[bool] = ..., entered: _Optional[str] = ..., held_out: _Optional[str] = ..., other_history: _Optional[str] = ...) -> None: ...

class ServingStatus(_message.Message):
    __slots__ = ("model", "start", "end", "num_sessions", "tokens_per_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    start: int
    end: int
    num_sessions: int
    tokens_per_s: float
    def __init__(self, model: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., num_sessions: _Optional[int] = ..., tokens_per_s: _Optional[float] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("peer_id", "name", "path", "rtt_ms", "sent_bytes", "received_bytes")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    path: str
    rtt_ms: float
    sent_bytes: int
    received_bytes: int
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., path: _Optional[str] = ..., rtt_ms: _Optional[float] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class RelayStatus(_message.Message):
    __slots__ = ("num_reservations", "num_circuits", "relayed_bytes", "num_refused", "throttled_s")
    NUM_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_CIRCUITS_FIELD_NUMBER: _ClassVar[int]
    RELAYED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_S_FIELD_NUMBER: _ClassVar[int]
    num_reservations: int
    num_circuits: int
    relayed_bytes: int
    num_refused: int
    throttled_s: float
    def __init__(self, num_reservations: _Optional[int] = ..., num_circuits: _Optional[int] = ..., relayed_bytes: _Optional[int] = ..., num_refused: _Optional[int] = ..., throttled_s: _Optional[float] = ...) -> None: ...

class LimitStatus(_message.Message):
    __slots__ = ("max_upload_bytes_per_s", "max_download_bytes_per_s", "upload_bytes_per_s", "download_bytes_per_s", "hours")
    MAX_UPLOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_DOWNLOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    HOURS_FIELD_NUMBER: _ClassVar[int]
    max_upload_bytes_per_s: int
    max_download_bytes_per_s: int
    upload_bytes_per_s: float
    download_bytes_per_s: float
    hours: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, max_upload_bytes_per_s: _Optional[int] = ..., max_download_bytes_per_s: _Optional[int] = ..., upload_bytes_per_s: _Optional[float] = ..., download_bytes_per_s: _Optional[float] = ..., hours: _Optional[_Iterable[str]] = ...) -> None: ...

class SpotCheckStatus(_message.Message):
    __slots__ = ("num_passed", "num_failed", "num_disputed", "num_unchecked", "barred")
    NUM_PASSED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_DISPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCHECKED_FIELD_NUMBER: _ClassVar[int]
    BARRED_FIELD_NUMBER: _ClassVar[int]
    num_passed: int
    num_failed: int
    num_disputed: int
    num_unchecked: int
    barred: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_passed: _Optional[int] = ..., num_failed: _Optional[int] = ..., num_disputed: _Optional[int] = ..., num_unchecked: _Optional[int] = ..., barred: _Optional[_Iterable[str]] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("peer_id", "name", "version", "pid", "uptime_s", "network_id", "addrs", "reachability", "num_peers", "state", "training", "serving", "memory_bytes", "pause", "lends_again_at", "month_bytes", "month_budget_bytes", "paths", "peers", "relaying", "limits", "spot_checks", "convicted_servers", "not_joined", "protocol_version")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NETWORK_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRS_FIELD_NUMBER: _ClassVar[int]
    REACHABILITY_FIELD_NUMBER: _ClassVar[int]
    NUM_PEERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    LENDS_AGAIN_AT_FIELD_NUMBER: _ClassVar[int]
    MONTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    MONTH_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    RELAYING_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SPOT_CHECKS_FIELD_NUMBER: _ClassVar[int]
    CONVICTED_SERVERS_FIELD_NUMBER: _ClassVar[int]
    NOT_JOINED_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    version: str
    pid: int
    uptime_s: float
    network_id: str
    addrs: _containers.RepeatedScalarFieldContainer[str]
    reachability: str
    num_peers: int
    state: str
    training: TrainingStatus
    serving: ServingStatus
    memory_bytes: int
    pause: str
    lends_again_at: float
    month_bytes: int
    month_budget_bytes: int
    paths: _records_pb2.PathCounts
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    relaying: RelayStatus
    limits: LimitStatus
    spot_checks: SpotCheckStatus
    convicted_servers: _containers.RepeatedScalarFieldContainer[str]
    not_joined: str
    protocol_version: int
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., version: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[float] = ..., network_id: _Optional[str] = ..., addrs: _Optional[_Iterable[str]] = ..., reachability: _Optional[str] = ..., num_peers: _Optional[int] = ..., state: _Optional[str] = ..., training: _Optional[_Union[TrainingStatus, _Mapping]] = ..., serving: _Optional[_Union[ServingStatus, _Mapping]] = ..., memory_bytes: _Optional[int] = ..., pause: _Optional[str] = ..., lends_again_at: _Optional[float] = ..., month_bytes: _Optional[int] = ..., month_budget_bytes: _Optional[int] = ..., paths: _Optional[_Union[_records_pb2.PathCounts, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., relaying: _Optional[_Union[RelayStatus, _Mapping]] = ..., limits: _Optional[_Union[LimitStatus, _Mapping]] = ..., spot_checks: _Optional[_Union[SpotCheckStatus, _Mapping]] = ..., convicted_servers: _Optional[_Iterable[str]] = ..., not_joined: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("drain",)
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    drain: bool
    def __init__(self, drain: _Optional[bool] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ("pid", "seconds")
    PID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    seconds: float
    def __init__(self, pid: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...
