from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FindRequest(_message.Message):
    __slots__ = ("keys", "only_peers", "addrs", "max_records")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ONLY_PEERS_FIELD_NUMBER: _ClassVar[int]
    ADDRS_FIELD_NUMBER: _ClassVar[int]
    MAX_RECORDS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    only_peers: bool
    addrs: _containers.RepeatedScalarFieldContainer[str]
    max_records: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., only_peers: _Optional[bool] = ..., addrs: _Optional[_Iterable[str]] = ..., max_records: _Optional[int] = ...) -> None: ...

class Contact(_message.Message):
    __slots__ = ("peer_id", "addrs")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    addrs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_id: _Optional[str] = ..., addrs: _Optional[_Iterable[str]] = ...) -> None: ...

class Found(_message.Message):
    __slots__ = ("records", "peers")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedScalarFieldContainer[bytes]
    peers: _containers.RepeatedCompositeFieldContainer[Contact]
    def __init__(self, records: _Optional[_Iterable[bytes]] = ..., peers: _Optional[_Iterable[_Union[Contact, _Mapping]]] = ...) -> None: ...

class FindResponse(_message.Message):
    __slots__ = ("found", "addrs", "is_cut")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    ADDRS_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_FIELD_NUMBER: _ClassVar[int]
    found: _containers.RepeatedCompositeFieldContainer[Found]
    addrs: _containers.RepeatedScalarFieldContainer[str]
    is_cut: bool
    def __init__(self, found: _Optional[_Iterable[_Union[Found, _Mapping]]] = ..., addrs: _Optional[_Iterable[str]] = ..., is_cut: _Optional[bool] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    def __init__(self, record: _Optional[bytes] = ...) -> None: ...

class StoreResponse(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: bool
    def __init__(self, held: _Optional[bool] = ...) -> None: ...
