from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Compute(_message.Message):
    __slots__ = ("revision", "start", "end", "num_sequences", "num_positions", "of_tokens", "head", "codec", "deadline_s", "num_top", "num_last", "temperature", "has_targets")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    OF_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    NUM_LAST_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    HAS_TARGETS_FIELD_NUMBER: _ClassVar[int]
    revision: str
    start: int
    end: int
    num_sequences: int
    num_positions: int
    of_tokens: bool
    head: bool
    codec: str
    deadline_s: float
    num_top: int
    num_last: int
    temperature: float
    has_targets: bool
    def __init__(self, revision: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_positions: _Optional[int] = ..., of_tokens: _Optional[bool] = ..., head: _Optional[bool] = ..., codec: _Optional[str] = ..., deadline_s: _Optional[float] = ..., num_top: _Optional[int] = ..., num_last: _Optional[int] = ..., temperature: _Optional[float] = ..., has_targets: _Optional[bool] = ...) -> None: ...

class TensorPiece(_message.Message):
    __slots__ = ("codec", "num_rows", "num_columns")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    codec: str
    num_rows: int
    num_columns: int
    def __init__(self, codec: _Optional[str] = ..., num_rows: _Optional[int] = ..., num_columns: _Optional[int] = ...) -> None: ...
