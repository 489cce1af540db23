from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PathAddrs(_message.Message):
    __slots__ = ("addrs",)
    ADDRS_FIELD_NUMBER: _ClassVar[int]
    addrs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addrs: _Optional[_Iterable[str]] = ...) -> None: ...

class Introduction(_message.Message):
    __slots__ = ("peer_id", "addrs")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    addrs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_id: _Optional[str] = ..., addrs: _Optional[_Iterable[str]] = ...) -> None: ...

class PathAnswer(_message.Message):
    __slots__ = ("agreed", "addrs")
    AGREED_FIELD_NUMBER: _ClassVar[int]
    ADDRS_FIELD_NUMBER: _ClassVar[int]
    agreed: bool
    addrs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, agreed: _Optional[bool] = ..., addrs: _Optional[_Iterable[str]] = ...) -> None: ...
