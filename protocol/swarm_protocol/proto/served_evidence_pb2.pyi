from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServedEvidence(_message.Message):
    __slots__ = ("commitment", "codec", "inputs", "outputs", "draws")
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    commitment: bytes
    codec: str
    inputs: bytes
    outputs: bytes
    draws: _containers.RepeatedCompositeFieldContainer[ShownDraw]
    def __init__(self, commitment: _Optional[bytes] = ..., codec: _Optional[str] = ..., inputs: _Optional[bytes] = ..., outputs: _Optional[bytes] = ..., draws: _Optional[_Iterable[_Union[ShownDraw, _Mapping]]] = ...) -> None: ...

class ShownDraw(_message.Message):
    __slots__ = ("position", "index", "seed", "temperature", "top_p", "top_k", "min_p", "token_id", "fingerprint")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    position: int
    index: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    token_id: int
    fingerprint: bytes
    def __init__(self, position: _Optional[int] = ..., index: _Optional[int] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., token_id: _Optional[int] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class WrongPossession(_message.Message):
    __slots__ = ("manifest", "statement")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    statement: bytes
    def __init__(self, manifest: _Optional[bytes] = ..., statement: _Optional[bytes] = ...) -> None: ...

class ServerBansRequest(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, known: _Optional[_Iterable[str]] = ...) -> None: ...
