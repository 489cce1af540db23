from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class RunTerms(_message.Message):
    __slots__ = ("run", "serial", "max_uses", "is_bound")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    MAX_USES_FIELD_NUMBER: _ClassVar[int]
    IS_BOUND_FIELD_NUMBER: _ClassVar[int]
    run: str
    serial: int
    max_uses: int
    is_bound: bool
    def __init__(self, run: _Optional[str] = ..., serial: _Optional[int] = ..., max_uses: _Optional[int] = ..., is_bound: _Optional[bool] = ...) -> None: ...

class RunRevocation(_message.Message):
    __slots__ = ("run", "serials", "inviters")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SERIALS_FIELD_NUMBER: _ClassVar[int]
    INVITERS_FIELD_NUMBER: _ClassVar[int]
    run: str
    serials: _containers.RepeatedScalarFieldContainer[int]
    inviters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., serials: _Optional[_Iterable[int]] = ..., inviters: _Optional[_Iterable[str]] = ...) -> None: ...

class RunInvitation(_message.Message):
    __slots__ = ("certificate", "key", "vouch")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VOUCH_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    key: bytes
    vouch: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., key: _Optional[bytes] = ..., vouch: _Optional[bytes] = ...) -> None: ...
