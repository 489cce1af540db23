"""Examples of each message by which members of a round prove what they have reduced."""

from __future__ import annotations

from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import (
    BadSlice,
    Evidence,
    EvidenceFile,
    EvidenceOffer,
    EvidenceRequest,
    IntervalFinding,
    WrongInterval,
    WrongReduction,
)
from swarm_protocol.reduction_messages import AuditDraw, AuditedSlice, PartStatement

DIGEST = bytes(range(32))
PEER = Identity(b"b" * 32).peer_id

EXAMPLES: tuple[object, ...] = (
    PartStatement(run="stdlib-1f00ba44", step=3, attempt=1, group_digest=DIGEST, part=2, result_root=DIGEST[::-1]),
    AuditDraw(leaf=1000),
    AuditedSlice(data=b"encoded slice", proof=DIGEST),
    Evidence(kind="wrong_reduction", body=b"message of the kind"),
    IntervalFinding(run="stdlib-1f00ba44", step=3, attempt=1, origin_digest=DIGEST, peer=PEER),
    WrongInterval(
        certificate=b"certificate",
        peer=PEER,
        slices=(AuditedSlice(data=b"encoded slice", proof=DIGEST), AuditedSlice(data=b"another")),
        findings=(b"signed finding", b"another one"),
    ),
    BadSlice(
        peer=PEER,
        step=3,
        state_digest=DIGEST,
        root=DIGEST[::-1],
        signature=bytes(64),
        num_leaves=1024,
        leaf=17,
        shown=AuditedSlice(data=b"encoded slice", proof=DIGEST),
    ),
    EvidenceOffer(peer=PEER, step=3),
    EvidenceRequest(run="stdlib-1f00ba44"),
    EvidenceRequest(run="stdlib-1f00ba44", known=(PEER,)),
    EvidenceFile(network_id="public", run=b"name = 'stdlib'", evidence=b"evidence"),
    WrongReduction(
        group=b"signed group",
        statement=b"signed statement",
        leaf=17,
        result=b"encoded result",
        result_proof=DIGEST,
        slices=(AuditedSlice(data=b"encoded slice", proof=DIGEST), AuditedSlice(data=b"another")),
    ),
)
