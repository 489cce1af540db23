"""Examples of each message about two statements that differ."""

from __future__ import annotations

from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import Equivocation, StatedReport, StatedVote
from swarm_protocol.training_messages import Contribution

DIGEST = bytes(range(32))
PEER = Identity(b"b" * 32).peer_id

EXAMPLES: tuple[object, ...] = (
    Equivocation(statement="vote", peer=PEER, first=b"one vote", second=b"another"),
    StatedVote(
        step=3,
        attempt=1,
        kind="prepare",
        state_digest=DIGEST,
        sequence=2,
        group_digest=DIGEST,
        outcome_digest=DIGEST[::-1],
        signature=bytes(64),
    ),
    StatedReport(
        step=3,
        attempt=1,
        state_digest=DIGEST,
        report=Contribution(peer_id=PEER, num_tokens=8, num_samples=2, loss=1.5, signature=bytes(64)),
    ),
)
