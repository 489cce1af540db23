from swarm_protocol.proto import training_pb2 as _training_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Equivocation(_message.Message):
    __slots__ = ("statement", "peer", "first", "second")
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    statement: str
    peer: str
    first: bytes
    second: bytes
    def __init__(self, statement: _Optional[str] = ..., peer: _Optional[str] = ..., first: _Optional[bytes] = ..., second: _Optional[bytes] = ...) -> None: ...

class StatedVote(_message.Message):
    __slots__ = ("step", "attempt", "kind", "state_digest", "sequence", "group_digest", "outcome_digest", "signature")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GROUP_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: int
    kind: str
    state_digest: bytes
    sequence: int
    group_digest: bytes
    outcome_digest: bytes
    signature: bytes
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[int] = ..., kind: _Optional[str] = ..., state_digest: _Optional[bytes] = ..., sequence: _Optional[int] = ..., group_digest: _Optional[bytes] = ..., outcome_digest: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class StatedReport(_message.Message):
    __slots__ = ("step", "attempt", "state_digest", "sequence", "report")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: int
    state_digest: bytes
    sequence: int
    report: _training_pb2.Contribution
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., sequence: _Optional[int] = ..., report: _Optional[_Union[_training_pb2.Contribution, _Mapping]] = ...) -> None: ...
