"""A store of evidence in memory, for members of runs and for nodes that know servers."""

from __future__ import annotations

from swarm.evidence_folder import EvidenceFolder


class KeptEvidence(dict[str, bytes], EvidenceFolder):
    """Replaces the files of an EvidenceFolder by the evidence in memory, by the peer id of whom it convicts."""

    def read(self) -> list[bytes]:
        return list(self.values())

    def keep(self, peer_id: str, evidence: bytes) -> None:
        self[peer_id] = evidence

    def forget(self, peer_id: str) -> None:
        self.pop(peer_id, None)
