from swarm_protocol.proto import hello_pb2 as _hello_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InvitationTerms(_message.Message):
    __slots__ = ("serial", "rights", "is_bound")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    IS_BOUND_FIELD_NUMBER: _ClassVar[int]
    serial: int
    rights: _containers.RepeatedScalarFieldContainer[str]
    is_bound: bool
    def __init__(self, serial: _Optional[int] = ..., rights: _Optional[_Iterable[str]] = ..., is_bound: _Optional[bool] = ...) -> None: ...

class Revocations(_message.Message):
    __slots__ = ("number", "serials")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SERIALS_FIELD_NUMBER: _ClassVar[int]
    number: int
    serials: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., serials: _Optional[_Iterable[int]] = ...) -> None: ...

class NetworkInvitation(_message.Message):
    __slots__ = ("certificate", "secret", "key", "seeds")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    secret: bytes
    key: bytes
    seeds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, certificate: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., key: _Optional[bytes] = ..., seeds: _Optional[_Iterable[str]] = ...) -> None: ...

class PrivateGreeting(_message.Message):
    __slots__ = ("hello", "chain", "revocations", "refusal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    REVOCATIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    chain: _containers.RepeatedScalarFieldContainer[bytes]
    revocations: bytes
    refusal: str
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., chain: _Optional[_Iterable[bytes]] = ..., revocations: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...
