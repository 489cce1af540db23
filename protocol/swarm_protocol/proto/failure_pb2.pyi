from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Failure(_message.Message):
    __slots__ = ("code", "message", "remedy", "peer_id", "retry_after_s", "missing", "session_id", "reason")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Failure.Reason]
        NO_ROOM: _ClassVar[Failure.Reason]
    UNSPECIFIED: Failure.Reason
    NO_ROOM: Failure.Reason
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    remedy: str
    peer_id: str
    retry_after_s: float
    missing: _containers.RepeatedScalarFieldContainer[str]
    session_id: str
    reason: Failure.Reason
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., remedy: _Optional[str] = ..., peer_id: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., missing: _Optional[_Iterable[str]] = ..., session_id: _Optional[str] = ..., reason: _Optional[_Union[Failure.Reason, str]] = ...) -> None: ...
