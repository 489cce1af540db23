from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Request(_message.Message):
    __slots__ = ("type", "connect", "streamOpen", "streamHandler", "disconnect")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        IDENTIFY: _ClassVar[Request.Type]
        CONNECT: _ClassVar[Request.Type]
        STREAM_OPEN: _ClassVar[Request.Type]
        STREAM_HANDLER: _ClassVar[Request.Type]
        LIST_PEERS: _ClassVar[Request.Type]
        DISCONNECT: _ClassVar[Request.Type]
        PERSISTENT_CONN_UPGRADE: _ClassVar[Request.Type]
    IDENTIFY: Request.Type
    CONNECT: Request.Type
    STREAM_OPEN: Request.Type
    STREAM_HANDLER: Request.Type
    LIST_PEERS: Request.Type
    DISCONNECT: Request.Type
    PERSISTENT_CONN_UPGRADE: Request.Type
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    STREAMOPEN_FIELD_NUMBER: _ClassVar[int]
    STREAMHANDLER_FIELD_NUMBER: _ClassVar[int]
    DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    type: Request.Type
    connect: ConnectRequest
    streamOpen: StreamOpenRequest
    streamHandler: StreamHandlerRequest
    disconnect: DisconnectRequest
    def __init__(self, type: _Optional[_Union[Request.Type, str]] = ..., connect: _Optional[_Union[ConnectRequest, _Mapping]] = ..., streamOpen: _Optional[_Union[StreamOpenRequest, _Mapping]] = ..., streamHandler: _Optional[_Union[StreamHandlerRequest, _Mapping]] = ..., disconnect: _Optional[_Union[DisconnectRequest, _Mapping]] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("peer", "addrs")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRS_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    addrs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, peer: _Optional[bytes] = ..., addrs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StreamOpenRequest(_message.Message):
    __slots__ = ("peer", "proto")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PROTO_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    proto: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer: _Optional[bytes] = ..., proto: _Optional[_Iterable[str]] = ...) -> None: ...

class StreamHandlerRequest(_message.Message):
    __slots__ = ("addr", "proto", "balanced")
    ADDR_FIELD_NUMBER: _ClassVar[int]
    PROTO_FIELD_NUMBER: _ClassVar[int]
    BALANCED_FIELD_NUMBER: _ClassVar[int]
    addr: bytes
    proto: _containers.RepeatedScalarFieldContainer[str]
    balanced: bool
    def __init__(self, addr: _Optional[bytes] = ..., proto: _Optional[_Iterable[str]] = ..., balanced: _Optional[bool] = ...) -> None: ...

class DisconnectRequest(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    def __init__(self, peer: _Optional[bytes] = ...) -> None: ...

class Response(_message.Message):
    __slots__ = ("type", "error", "identify", "peers")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OK: _ClassVar[Response.Type]
        ERROR: _ClassVar[Response.Type]
    OK: Response.Type
    ERROR: Response.Type
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    IDENTIFY_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    type: Response.Type
    error: ErrorResponse
    identify: IdentifyResponse
    peers: _containers.RepeatedCompositeFieldContainer[PeerInfo]
    def __init__(self, type: _Optional[_Union[Response.Type, str]] = ..., error: _Optional[_Union[ErrorResponse, _Mapping]] = ..., identify: _Optional[_Union[IdentifyResponse, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[PeerInfo, _Mapping]]] = ...) -> None: ...

class ErrorResponse(_message.Message):
    __slots__ = ("msg",)
    MSG_FIELD_NUMBER: _ClassVar[int]
    msg: str
    def __init__(self, msg: _Optional[str] = ...) -> None: ...

class IdentifyResponse(_message.Message):
    __slots__ = ("id", "addrs")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRS_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    addrs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, id: _Optional[bytes] = ..., addrs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PeerInfo(_message.Message):
    __slots__ = ("id", "addrs")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRS_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    addrs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, id: _Optional[bytes] = ..., addrs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StreamInfo(_message.Message):
    __slots__ = ("peer", "addr", "proto")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDR_FIELD_NUMBER: _ClassVar[int]
    PROTO_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    addr: bytes
    proto: str
    def __init__(self, peer: _Optional[bytes] = ..., addr: _Optional[bytes] = ..., proto: _Optional[str] = ...) -> None: ...

class PersistentConnectionRequest(_message.Message):
    __slots__ = ("callId", "addUnaryHandler", "callUnary", "unaryResponse", "cancel")
    CALLID_FIELD_NUMBER: _ClassVar[int]
    ADDUNARYHANDLER_FIELD_NUMBER: _ClassVar[int]
    CALLUNARY_FIELD_NUMBER: _ClassVar[int]
    UNARYRESPONSE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    callId: bytes
    addUnaryHandler: AddUnaryHandlerRequest
    callUnary: CallUnaryRequest
    unaryResponse: CallUnaryResponse
    cancel: Cancel
    def __init__(self, callId: _Optional[bytes] = ..., addUnaryHandler: _Optional[_Union[AddUnaryHandlerRequest, _Mapping]] = ..., callUnary: _Optional[_Union[CallUnaryRequest, _Mapping]] = ..., unaryResponse: _Optional[_Union[CallUnaryResponse, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class PersistentConnectionResponse(_message.Message):
    __slots__ = ("callId", "callUnaryResponse", "requestHandling", "daemonError", "cancel")
    CALLID_FIELD_NUMBER: _ClassVar[int]
    CALLUNARYRESPONSE_FIELD_NUMBER: _ClassVar[int]
    REQUESTHANDLING_FIELD_NUMBER: _ClassVar[int]
    DAEMONERROR_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    callId: bytes
    callUnaryResponse: CallUnaryResponse
    requestHandling: CallUnaryRequest
    daemonError: DaemonError
    cancel: Cancel
    def __init__(self, callId: _Optional[bytes] = ..., callUnaryResponse: _Optional[_Union[CallUnaryResponse, _Mapping]] = ..., requestHandling: _Optional[_Union[CallUnaryRequest, _Mapping]] = ..., daemonError: _Optional[_Union[DaemonError, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class AddUnaryHandlerRequest(_message.Message):
    __slots__ = ("proto", "balanced")
    PROTO_FIELD_NUMBER: _ClassVar[int]
    BALANCED_FIELD_NUMBER: _ClassVar[int]
    proto: str
    balanced: bool
    def __init__(self, proto: _Optional[str] = ..., balanced: _Optional[bool] = ...) -> None: ...

class CallUnaryRequest(_message.Message):
    __slots__ = ("peer", "proto", "data")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PROTO_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    proto: str
    data: bytes
    def __init__(self, peer: _Optional[bytes] = ..., proto: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class CallUnaryResponse(_message.Message):
    __slots__ = ("response", "error")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    response: bytes
    error: bytes
    def __init__(self, response: _Optional[bytes] = ..., error: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DaemonError(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...
