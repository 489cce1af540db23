"""Defines the messages on the streams of a reduction: the opening of a stream, and an owner's statements and slices for
the auditors of its part.

Slices and results follow an opening as encoded frames, which have no message. `training_messages` has the groups that
reduce, and `proof_messages` the evidence that these messages can make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from swarm_protocol import limits, wire
from swarm_protocol.checks import Digest, Name, whole
from swarm_protocol.commit_messages import Attempt, Step
from swarm_protocol.proto import proofs_pb2, training_pb2

PART_PURPOSE = "part"

OpeningKind: TypeAlias = Literal["exchange", "keep", "result", "slices", "audit", "proof"]
Leaf: TypeAlias = Annotated[int, whole(limits.MAX_LEAVES - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceOpening(wire.WireMessage):
    """The first message of a stream of a reduction, of the signed group `group_digest` of `step`. `frame` counts
    the part's frames. `kind`:

    exchange  to the owner of `part`: the sender's slices follow, and it asks for the result
    keep      from the owner to its backup: the owner's own slices follow
    result    to the backup: the owner failed, and the sender asks for the result from `frame` on
    slices    from the backup: it replaces the owner, and asks for the receiver's slices from `frame` on
    audit     to the owner or the backup: the sender asks for a PartStatement, and then for slices (see `AuditDraw`)
    proof     from the owner: it cannot decode one leaf of the receiver's slice, which it names by an AuditDraw, and
              asks for its path to the receiver's root; the answer is an AuditedSlice without data

    A sender of slices first shows that they are under its committed root: `proof` leads there, together with the
    digests of the leaves of its slice of the part, which the receiver computes from the slice. The receiver of a
    `slices` opening answers with such an opening.
    """

    PROTO = training_pb2.ReduceOpening
    MAX_BYTES = limits.MAX_OPENING_BYTES

    kind: OpeningKind
    part: Annotated[int, whole(limits.MAX_GROUP_MEMBERS - 1)]
    step: Step
    group_digest: Digest
    frame: Annotated[int, whole(limits.MAX_PART_VALUES)] = 0
    proof: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest(wire.WireMessage):
    """Asks a member for the signed group with this digest, by which it has opened a stream; the reply is its bytes."""

    PROTO = training_pb2.GroupRequest
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    run: Name
    group_digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatement(wire.WireMessage):
    """A statement of its signer, an owner or backup, that it has reduced `part` of the group `group_digest` from the
    slices to which the group's contributors have committed. `result_root` is the root of the hash tree over the leaves
    of the result."""

    PROTO = proofs_pb2.PartStatement
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    run: Name
    step: Step
    attempt: Attempt
    group_digest: Digest
    part: Annotated[int, whole(limits.MAX_GROUP_MEMBERS - 1)]
    result_root: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditDraw(wire.WireMessage):
    """An auditor's request, after the PartStatement, for all contributors' slices of one `leaf` of the vector."""

    PROTO = proofs_pb2.AuditDraw
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    leaf: Leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedSlice(wire.WireMessage):
    """One contributor's encoded slice of a leaf. `proof` shows that the slice is under the contributor's committed
    root."""

    PROTO = proofs_pb2.AuditedSlice
    MAX_BYTES = limits.MAX_AUDITED_SLICE_BYTES

    data: bytes
    proof: bytes = b""
