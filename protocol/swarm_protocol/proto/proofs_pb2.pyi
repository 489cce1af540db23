from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PartStatement(_message.Message):
    __slots__ = ("run", "step", "attempt", "group_digest", "part", "result_root")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GROUP_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    RESULT_ROOT_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    attempt: int
    group_digest: bytes
    part: int
    result_root: bytes
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., group_digest: _Optional[bytes] = ..., part: _Optional[int] = ..., result_root: _Optional[bytes] = ...) -> None: ...

class AuditDraw(_message.Message):
    __slots__ = ("leaf",)
    LEAF_FIELD_NUMBER: _ClassVar[int]
    leaf: int
    def __init__(self, leaf: _Optional[int] = ...) -> None: ...

class AuditedSlice(_message.Message):
    __slots__ = ("data", "proof")
    DATA_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    proof: bytes
    def __init__(self, data: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("kind", "body")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    body: bytes
    def __init__(self, kind: _Optional[str] = ..., body: _Optional[bytes] = ...) -> None: ...

class WrongReduction(_message.Message):
    __slots__ = ("group", "statement", "leaf", "result", "result_proof", "slices")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    RESULT_PROOF_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    group: bytes
    statement: bytes
    leaf: int
    result: bytes
    result_proof: bytes
    slices: _containers.RepeatedCompositeFieldContainer[AuditedSlice]
    def __init__(self, group: _Optional[bytes] = ..., statement: _Optional[bytes] = ..., leaf: _Optional[int] = ..., result: _Optional[bytes] = ..., result_proof: _Optional[bytes] = ..., slices: _Optional[_Iterable[_Union[AuditedSlice, _Mapping]]] = ...) -> None: ...

class IntervalFinding(_message.Message):
    __slots__ = ("run", "step", "attempt", "origin_digest", "peer")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    attempt: int
    origin_digest: bytes
    peer: str
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., origin_digest: _Optional[bytes] = ..., peer: _Optional[str] = ...) -> None: ...

class WrongInterval(_message.Message):
    __slots__ = ("certificate", "peer", "slices", "findings")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    peer: str
    slices: _containers.RepeatedCompositeFieldContainer[AuditedSlice]
    findings: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, certificate: _Optional[bytes] = ..., peer: _Optional[str] = ..., slices: _Optional[_Iterable[_Union[AuditedSlice, _Mapping]]] = ..., findings: _Optional[_Iterable[bytes]] = ...) -> None: ...

class BadSlice(_message.Message):
    __slots__ = ("peer", "step", "state_digest", "root", "signature", "num_leaves", "leaf", "shown")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    NUM_LEAVES_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    peer: str
    step: int
    state_digest: bytes
    root: bytes
    signature: bytes
    num_leaves: int
    leaf: int
    shown: AuditedSlice
    def __init__(self, peer: _Optional[str] = ..., step: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., root: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., num_leaves: _Optional[int] = ..., leaf: _Optional[int] = ..., shown: _Optional[_Union[AuditedSlice, _Mapping]] = ...) -> None: ...

class EvidenceOffer(_message.Message):
    __slots__ = ("peer", "step")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    peer: str
    step: int
    def __init__(self, peer: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class EvidenceRequest(_message.Message):
    __slots__ = ("run", "known")
    RUN_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    run: str
    known: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., known: _Optional[_Iterable[str]] = ...) -> None: ...

class EvidenceFile(_message.Message):
    __slots__ = ("network_id", "run", "evidence")
    NETWORK_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    network_id: str
    run: bytes
    evidence: bytes
    def __init__(self, network_id: _Optional[str] = ..., run: _Optional[bytes] = ..., evidence: _Optional[bytes] = ...) -> None: ...
