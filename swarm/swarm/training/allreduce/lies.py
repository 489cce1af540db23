"""The errors that say more of a member than its name: what it did can be proved to others."""

from __future__ import annotations

from swarm_compression.codec import Data
from swarm_protocol.errors import PeerViolation
from swarm_protocol.proof_messages import Evidence


class CaughtLying(PeerViolation):
    """A member has done what no honest member does, as `evidence` shows to anyone."""

    def __init__(self, message: str, *, peer_id: str, evidence: Evidence) -> None:
        super().__init__(message, peer_id=peer_id)
        self.evidence = evidence


class UndecodableSlice(PeerViolation):
    """A member has sent `data` as its slice of `frame`, a place in the step's vector, and nobody can decode that."""

    def __init__(self, message: str, *, peer_id: str, data: Data, frame: slice) -> None:
        super().__init__(message, peer_id=peer_id)
        self.data = data
        self.frame = frame
