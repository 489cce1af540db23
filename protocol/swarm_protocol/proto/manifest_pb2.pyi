from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ManifestFile(_message.Message):
    __slots__ = ("name", "num_bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_bytes: int
    sha256: bytes
    def __init__(self, name: _Optional[str] = ..., num_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class WeightFile(_message.Message):
    __slots__ = ("name", "num_bytes", "sha256", "root")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_bytes: int
    sha256: bytes
    root: bytes
    def __init__(self, name: _Optional[str] = ..., num_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., root: _Optional[bytes] = ...) -> None: ...

class ByteRange(_message.Message):
    __slots__ = ("file", "start", "num_bytes")
    FILE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    file: int
    start: int
    num_bytes: int
    def __init__(self, file: _Optional[int] = ..., start: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class BlockBytes(_message.Message):
    __slots__ = ("ranges",)
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[ByteRange]
    def __init__(self, ranges: _Optional[_Iterable[_Union[ByteRange, _Mapping]]] = ...) -> None: ...

class ModelManifest(_message.Message):
    __slots__ = ("name", "publisher", "published_at", "files", "weights", "before", "blocks", "after", "origin")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    publisher: str
    published_at: int
    files: _containers.RepeatedCompositeFieldContainer[ManifestFile]
    weights: _containers.RepeatedCompositeFieldContainer[WeightFile]
    before: _containers.RepeatedCompositeFieldContainer[ByteRange]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockBytes]
    after: _containers.RepeatedCompositeFieldContainer[ByteRange]
    origin: str
    def __init__(self, name: _Optional[str] = ..., publisher: _Optional[str] = ..., published_at: _Optional[int] = ..., files: _Optional[_Iterable[_Union[ManifestFile, _Mapping]]] = ..., weights: _Optional[_Iterable[_Union[WeightFile, _Mapping]]] = ..., before: _Optional[_Iterable[_Union[ByteRange, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[BlockBytes, _Mapping]]] = ..., after: _Optional[_Iterable[_Union[ByteRange, _Mapping]]] = ..., origin: _Optional[str] = ...) -> None: ...

class SignedManifest(_message.Message):
    __slots__ = ("manifest", "signature")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    signature: bytes
    def __init__(self, manifest: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ModelManifestRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class DrawnChunk(_message.Message):
    __slots__ = ("file", "index")
    FILE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    file: int
    index: int
    def __init__(self, file: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class PossessionRequest(_message.Message):
    __slots__ = ("manifest", "nonce", "drawn")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    nonce: bytes
    drawn: _containers.RepeatedCompositeFieldContainer[DrawnChunk]
    def __init__(self, manifest: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., drawn: _Optional[_Iterable[_Union[DrawnChunk, _Mapping]]] = ...) -> None: ...

class ChunkPath(_message.Message):
    __slots__ = ("digest", "siblings")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    siblings: bytes
    def __init__(self, digest: _Optional[bytes] = ..., siblings: _Optional[bytes] = ...) -> None: ...

class PossessionStatement(_message.Message):
    __slots__ = ("manifest", "nonce", "asker", "drawn", "paths")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ASKER_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    nonce: bytes
    asker: str
    drawn: _containers.RepeatedCompositeFieldContainer[DrawnChunk]
    paths: _containers.RepeatedCompositeFieldContainer[ChunkPath]
    def __init__(self, manifest: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., asker: _Optional[str] = ..., drawn: _Optional[_Iterable[_Union[DrawnChunk, _Mapping]]] = ..., paths: _Optional[_Iterable[_Union[ChunkPath, _Mapping]]] = ...) -> None: ...

class PossessionResponse(_message.Message):
    __slots__ = ("statement", "chunks")
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    statement: bytes
    chunks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, statement: _Optional[bytes] = ..., chunks: _Optional[_Iterable[bytes]] = ...) -> None: ...
