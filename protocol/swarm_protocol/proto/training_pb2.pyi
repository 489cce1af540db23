from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Contribution(_message.Message):
    __slots__ = ("peer_id", "num_tokens", "num_samples", "loss", "leaving", "bytes_per_s", "followers", "newcomers", "commitment", "locked", "signature", "steps_left", "credentials", "demoted", "effects", "discounted")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FOLLOWERS_FIELD_NUMBER: _ClassVar[int]
    NEWCOMERS_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    LOCKED_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    STEPS_LEFT_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_FIELD_NUMBER: _ClassVar[int]
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    DISCOUNTED_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    num_tokens: int
    num_samples: int
    loss: float
    leaving: bool
    bytes_per_s: int
    followers: _containers.RepeatedCompositeFieldContainer[Follower]
    newcomers: _containers.RepeatedScalarFieldContainer[str]
    commitment: SliceCommitment
    locked: LockClaim
    signature: bytes
    steps_left: int
    credentials: _containers.RepeatedCompositeFieldContainer[RunCredential]
    demoted: _containers.RepeatedScalarFieldContainer[str]
    effects: _containers.RepeatedScalarFieldContainer[int]
    discounted: bool
    def __init__(self, peer_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_samples: _Optional[int] = ..., loss: _Optional[float] = ..., leaving: _Optional[bool] = ..., bytes_per_s: _Optional[int] = ..., followers: _Optional[_Iterable[_Union[Follower, _Mapping]]] = ..., newcomers: _Optional[_Iterable[str]] = ..., commitment: _Optional[_Union[SliceCommitment, _Mapping]] = ..., locked: _Optional[_Union[LockClaim, _Mapping]] = ..., signature: _Optional[bytes] = ..., steps_left: _Optional[int] = ..., credentials: _Optional[_Iterable[_Union[RunCredential, _Mapping]]] = ..., demoted: _Optional[_Iterable[str]] = ..., effects: _Optional[_Iterable[int]] = ..., discounted: _Optional[bool] = ...) -> None: ...

class RunCredential(_message.Message):
    __slots__ = ("peer_id", "chain", "vouches")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    VOUCHES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    chain: _containers.RepeatedScalarFieldContainer[bytes]
    vouches: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, peer_id: _Optional[str] = ..., chain: _Optional[_Iterable[bytes]] = ..., vouches: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SliceCommitment(_message.Message):
    __slots__ = ("root", "signature")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    root: bytes
    signature: bytes
    def __init__(self, root: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Follower(_message.Message):
    __slots__ = ("place", "num_tokens", "num_samples", "leaving", "steps_left")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    STEPS_LEFT_FIELD_NUMBER: _ClassVar[int]
    place: int
    num_tokens: int
    num_samples: int
    leaving: bool
    steps_left: int
    def __init__(self, place: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_samples: _Optional[int] = ..., leaving: _Optional[bool] = ..., steps_left: _Optional[int] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("origin_digest", "part_digests", "state_digest")
    ORIGIN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PART_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    origin_digest: bytes
    part_digests: _containers.RepeatedScalarFieldContainer[bytes]
    state_digest: bytes
    def __init__(self, origin_digest: _Optional[bytes] = ..., part_digests: _Optional[_Iterable[bytes]] = ..., state_digest: _Optional[bytes] = ...) -> None: ...

class LockClaim(_message.Message):
    __slots__ = ("attempt", "outcome_digest")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_DIGEST_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    outcome_digest: bytes
    def __init__(self, attempt: _Optional[int] = ..., outcome_digest: _Optional[bytes] = ...) -> None: ...

class Lock(_message.Message):
    __slots__ = ("attempt", "group_digest", "outcome", "votes")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GROUP_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    group_digest: bytes
    outcome: Outcome
    votes: _containers.RepeatedCompositeFieldContainer[PlacedSignature]
    def __init__(self, attempt: _Optional[int] = ..., group_digest: _Optional[bytes] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., votes: _Optional[_Iterable[_Union[PlacedSignature, _Mapping]]] = ...) -> None: ...

class PlacedSignature(_message.Message):
    __slots__ = ("place", "signature")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    place: int
    signature: bytes
    def __init__(self, place: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("run", "step", "attempt", "state_digest", "num_tokens", "num_samples", "loss", "accused", "leaving", "bytes_per_s", "sequence", "followers", "newcomers", "commitment", "lock", "origin", "signature", "steps_left", "credentials", "demoted", "revocation", "effects", "discounted")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ACCUSED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FOLLOWERS_FIELD_NUMBER: _ClassVar[int]
    NEWCOMERS_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    LOCK_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    STEPS_LEFT_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_FIELD_NUMBER: _ClassVar[int]
    REVOCATION_FIELD_NUMBER: _ClassVar[int]
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    DISCOUNTED_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    attempt: int
    state_digest: bytes
    num_tokens: int
    num_samples: int
    loss: float
    accused: _containers.RepeatedScalarFieldContainer[str]
    leaving: bool
    bytes_per_s: int
    sequence: int
    followers: _containers.RepeatedCompositeFieldContainer[Follower]
    newcomers: _containers.RepeatedScalarFieldContainer[str]
    commitment: SliceCommitment
    lock: Lock
    origin: bytes
    signature: bytes
    steps_left: int
    credentials: _containers.RepeatedCompositeFieldContainer[RunCredential]
    demoted: _containers.RepeatedScalarFieldContainer[str]
    revocation: bytes
    effects: _containers.RepeatedScalarFieldContainer[int]
    discounted: bool
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., num_samples: _Optional[int] = ..., loss: _Optional[float] = ..., accused: _Optional[_Iterable[str]] = ..., leaving: _Optional[bool] = ..., bytes_per_s: _Optional[int] = ..., sequence: _Optional[int] = ..., followers: _Optional[_Iterable[_Union[Follower, _Mapping]]] = ..., newcomers: _Optional[_Iterable[str]] = ..., commitment: _Optional[_Union[SliceCommitment, _Mapping]] = ..., lock: _Optional[_Union[Lock, _Mapping]] = ..., origin: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., steps_left: _Optional[int] = ..., credentials: _Optional[_Iterable[_Union[RunCredential, _Mapping]]] = ..., demoted: _Optional[_Iterable[str]] = ..., revocation: _Optional[bytes] = ..., effects: _Optional[_Iterable[int]] = ..., discounted: _Optional[bool] = ...) -> None: ...

class ReadyReply(_message.Message):
    __slots__ = ("kind", "group", "attempt", "certificate", "state_digest", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: str
    group: bytes
    attempt: int
    certificate: bytes
    state_digest: bytes
    reason: str
    def __init__(self, kind: _Optional[str] = ..., group: _Optional[bytes] = ..., attempt: _Optional[int] = ..., certificate: _Optional[bytes] = ..., state_digest: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("run", "step", "state_digest", "credential")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    state_digest: bytes
    credential: RunCredential
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., credential: _Optional[_Union[RunCredential, _Mapping]] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("kind", "certificate")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    certificate: bytes
    def __init__(self, kind: _Optional[str] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class FollowerWork(_message.Message):
    __slots__ = ("num_tokens", "num_samples", "loss", "leaving")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_samples: int
    loss: float
    leaving: bool
    def __init__(self, num_tokens: _Optional[int] = ..., num_samples: _Optional[int] = ..., loss: _Optional[float] = ..., leaving: _Optional[bool] = ...) -> None: ...

class ReduceOpening(_message.Message):
    __slots__ = ("kind", "part", "frame", "proof", "group_digest", "step")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    GROUP_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    kind: str
    part: int
    frame: int
    proof: bytes
    group_digest: bytes
    step: int
    def __init__(self, kind: _Optional[str] = ..., part: _Optional[int] = ..., frame: _Optional[int] = ..., proof: _Optional[bytes] = ..., group_digest: _Optional[bytes] = ..., step: _Optional[int] = ...) -> None: ...

class GroupRequest(_message.Message):
    __slots__ = ("run", "group_digest")
    RUN_FIELD_NUMBER: _ClassVar[int]
    GROUP_DIGEST_FIELD_NUMBER: _ClassVar[int]
    run: str
    group_digest: bytes
    def __init__(self, run: _Optional[str] = ..., group_digest: _Optional[bytes] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("run", "step", "attempt", "state_digest", "members", "part_values", "reduce_s", "vote_s", "origin", "order", "lock", "revocation")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PART_VALUES_FIELD_NUMBER: _ClassVar[int]
    REDUCE_S_FIELD_NUMBER: _ClassVar[int]
    VOTE_S_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LOCK_FIELD_NUMBER: _ClassVar[int]
    REVOCATION_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    attempt: int
    state_digest: bytes
    members: _containers.RepeatedCompositeFieldContainer[Contribution]
    part_values: _containers.RepeatedScalarFieldContainer[int]
    reduce_s: float
    vote_s: float
    origin: bytes
    order: bytes
    lock: Lock
    revocation: bytes
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., members: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., part_values: _Optional[_Iterable[int]] = ..., reduce_s: _Optional[float] = ..., vote_s: _Optional[float] = ..., origin: _Optional[bytes] = ..., order: _Optional[bytes] = ..., lock: _Optional[_Union[Lock, _Mapping]] = ..., revocation: _Optional[bytes] = ...) -> None: ...

class ResumeOrder(_message.Message):
    __slots__ = ("run", "sequence", "outer_step", "state_digest", "roster")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    run: str
    sequence: int
    outer_step: int
    state_digest: bytes
    roster: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., sequence: _Optional[int] = ..., outer_step: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., roster: _Optional[_Iterable[str]] = ...) -> None: ...

class Endorsement(_message.Message):
    __slots__ = ("run", "sequence", "order_sequence", "outer_step", "next_attempt", "state_digest", "roster")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ORDER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    NEXT_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    run: str
    sequence: int
    order_sequence: int
    outer_step: int
    next_attempt: int
    state_digest: bytes
    roster: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., sequence: _Optional[int] = ..., order_sequence: _Optional[int] = ..., outer_step: _Optional[int] = ..., next_attempt: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., roster: _Optional[_Iterable[str]] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("run", "step", "attempt", "group_digest", "outcome", "kind", "signature", "state_digest", "sequence")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GROUP_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    attempt: int
    group_digest: bytes
    outcome: Outcome
    kind: str
    signature: bytes
    state_digest: bytes
    sequence: int
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., group_digest: _Optional[bytes] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., kind: _Optional[str] = ..., signature: _Optional[bytes] = ..., state_digest: _Optional[bytes] = ..., sequence: _Optional[int] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("group", "order", "outcome", "votes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    group: bytes
    order: bytes
    outcome: Outcome
    votes: _containers.RepeatedCompositeFieldContainer[PlacedSignature]
    def __init__(self, group: _Optional[bytes] = ..., order: _Optional[bytes] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., votes: _Optional[_Iterable[_Union[PlacedSignature, _Mapping]]] = ...) -> None: ...

class VoteReply(_message.Message):
    __slots__ = ("bytes_per_s",)
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    bytes_per_s: int
    def __init__(self, bytes_per_s: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("run", "step", "attempt", "group_digest", "reason", "accused")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GROUP_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACCUSED_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    attempt: int
    group_digest: bytes
    reason: str
    accused: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., group_digest: _Optional[bytes] = ..., reason: _Optional[str] = ..., accused: _Optional[_Iterable[str]] = ...) -> None: ...

class StandingRequest(_message.Message):
    __slots__ = ("run", "step", "hurry", "attempt", "watches")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HURRY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WATCHES_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    hurry: bool
    attempt: int
    watches: bool
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., hurry: _Optional[bool] = ..., attempt: _Optional[int] = ..., watches: _Optional[bool] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("outer_step", "state_digest", "certificate", "known", "attempt", "endorsement")
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ENDORSEMENT_FIELD_NUMBER: _ClassVar[int]
    outer_step: int
    state_digest: bytes
    certificate: bytes
    known: _containers.RepeatedScalarFieldContainer[str]
    attempt: int
    endorsement: bytes
    def __init__(self, outer_step: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., known: _Optional[_Iterable[str]] = ..., attempt: _Optional[int] = ..., endorsement: _Optional[bytes] = ...) -> None: ...

class PartRequest(_message.Message):
    __slots__ = ("origin_digest", "index")
    ORIGIN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    origin_digest: bytes
    index: int
    def __init__(self, origin_digest: _Optional[bytes] = ..., index: _Optional[int] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("state_digest",)
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    state_digest: bytes
    def __init__(self, state_digest: _Optional[bytes] = ...) -> None: ...

class ChunkRequest(_message.Message):
    __slots__ = ("state_digest", "index")
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    state_digest: bytes
    index: int
    def __init__(self, state_digest: _Optional[bytes] = ..., index: _Optional[int] = ...) -> None: ...
