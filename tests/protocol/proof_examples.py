"""One or more of each message by which members of a round prove what they have reduced."""

from __future__ import annotations

from swarm_protocol.proof_messages import AuditDraw, AuditedSlice, Evidence, PartStatement

DIGEST = bytes(range(32))

EXAMPLES: tuple[object, ...] = (
    PartStatement(run="stdlib-1f00ba44", step=3, attempt=1, group_digest=DIGEST, part=2, result_root=DIGEST[::-1]),
    AuditDraw(leaf=1000),
    AuditedSlice(data=b"encoded slice", proof=DIGEST),
    Evidence(
        group=b"signed group",
        statement=b"signed statement",
        leaf=17,
        result=b"encoded result",
        result_proof=DIGEST,
        slices=(AuditedSlice(data=b"encoded slice", proof=DIGEST), AuditedSlice(data=b"another")),
    ),
)
