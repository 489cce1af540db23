from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Open(_message.Message):
    __slots__ = ("session_id", "model", "revision", "start", "end", "max_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    revision: str
    start: int
    end: int
    max_tokens: int
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("max_step_tokens",)
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_step_tokens: int
    def __init__(self, max_step_tokens: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "codec", "payload")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: str
    payload: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[str] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("position", "want", "tensor")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    position: int
    want: str
    tensor: Tensor
    def __init__(self, position: _Optional[int] = ..., want: _Optional[str] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("position", "compute_ms", "queue_ms", "leave_within_s", "tensor")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    LEAVE_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    position: int
    compute_ms: float
    queue_ms: float
    leave_within_s: float
    tensor: Tensor
    def __init__(self, position: _Optional[int] = ..., compute_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., leave_within_s: _Optional[float] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class FilesRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ModelFile(_message.Message):
    __slots__ = ("name", "payload")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    name: str
    payload: bytes
    def __init__(self, name: _Optional[str] = ..., payload: _Optional[bytes] = ...) -> None: ...

class FilesResponse(_message.Message):
    __slots__ = ("revision", "files")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    revision: str
    files: _containers.RepeatedCompositeFieldContainer[ModelFile]
    def __init__(self, revision: _Optional[str] = ..., files: _Optional[_Iterable[_Union[ModelFile, _Mapping]]] = ...) -> None: ...
