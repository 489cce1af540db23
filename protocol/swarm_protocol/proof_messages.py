"""The messages by which members of a round prove what they have reduced, audit each other, and convict one that lied.

`swarm.training.allreduce.audit` says how an audit goes, `swarm.training.state.evidence` what evidence must show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_protocol import limits, wire
from swarm_protocol.checks import Digest, Name, up_to, whole
from swarm_protocol.proto import proofs_pb2
from swarm_protocol.training_messages import Attempt, Step

PART_PURPOSE = "part"

Leaf = Annotated[int, whole(limits.MAX_PART_VALUES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatement(wire.WireMessage):
    """Its signer, an owner or backup, has reduced `part` of the group `group_digest` from the slices that the group's
    contributors have committed to. `result_root` is that of the hash tree over the leaves of the result."""

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
    """After the PartStatement: an auditor asks for all contributors' slices of one `leaf` of the vector."""

    PROTO = proofs_pb2.AuditDraw
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    leaf: Leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedSlice(wire.WireMessage):
    """One contributor's encoded slice of a leaf. `proof` shows that it is under the contributor's committed root."""

    PROTO = proofs_pb2.AuditedSlice
    MAX_BYTES = limits.MAX_AUDITED_SLICE_BYTES

    data: bytes
    proof: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(wire.WireMessage):
    """What convicts the signer of `statement`, in the signed `group`.

    Its `result` of `leaf`, which `result_proof` shows to be under the stated root, is not what follows from the
    contributors' `slices`, in the order of the group.
    """

    PROTO = proofs_pb2.Evidence
    MAX_BYTES = limits.MAX_EVIDENCE_BYTES

    group: bytes
    statement: bytes
    leaf: Leaf
    result: bytes
    result_proof: bytes
    slices: Annotated[tuple[AuditedSlice, ...], up_to(limits.MAX_GROUP_MEMBERS)]
