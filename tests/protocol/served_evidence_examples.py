"""Examples of each message of evidence about servers."""

from __future__ import annotations

from swarm_protocol.identity import Identity
from swarm_protocol.served_evidence_messages import (
    ServedEvidence,
    ServerBansRequest,
    ShownDraw,
    WrongPossession,
)

EXAMPLES: tuple[object, ...] = (
    ServedEvidence(commitment=b"signed", codec="bf16", inputs=b"rows", outputs=b"others"),
    ServedEvidence(
        commitment=b"signed",
        codec="raw",
        inputs=b"rows",
        draws=(
            ShownDraw(position=4, index=0, token_id=17, fingerprint=bytes(16)),
            ShownDraw(position=5, index=1, seed=-5, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, token_id=3),
        ),
    ),
    WrongPossession(manifest=b"signed manifest", statement=b"signed statement"),
    ServerBansRequest(known=(Identity(bytes([5]) * 32).peer_id, Identity(bytes([6]) * 32).peer_id)),
)
