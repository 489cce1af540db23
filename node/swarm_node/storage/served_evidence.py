"""Evidence about servers in a home: for each server that a gateway's spot checks named, its newest wrong answer.

A file holds what a client asked, so only the home's owner may read it, and nothing sends it anywhere. Bounded in
number and bytes; the oldest go first. Blocks.
"""

from __future__ import annotations

import logging
from pathlib import Path

from swarm_protocol.proof_messages import EvidenceFile
from swarm_protocol.served_evidence_messages import ServedEvidence

from swarm_node.storage.home import NEW_SUFFIX, write_private

logger = logging.getLogger(__name__)

SUFFIX = ".evidence"
MAX_FILES = 64
MAX_BYTES = 256 * 2**20


def keep(folder: Path, peer_id: str, network_id: str, evidence: bytes) -> None:
    """Keep the ServedEvidence against `peer_id`, in place of an earlier one. A disk that refuses is a warning."""
    wrapped = ServedEvidence.from_bytes(evidence).evidence().to_bytes()
    data = EvidenceFile(network_id=network_id, run=b"", evidence=wrapped).to_bytes()
    try:
        write_evidence(folder, peer_id, data)
        _forget_oldest(folder)
    except OSError as error:
        logger.warning("cannot keep evidence against %s in %s: %s", peer_id, folder, error)


def write_evidence(folder: Path, peer_id: str, data: bytes) -> None:
    """Write the EvidenceFile `data` against `peer_id`, and remove what a crash left half written. One process writes
    to a folder. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for beside in folder.glob(f"*{SUFFIX}{NEW_SUFFIX}"):
        beside.unlink()
    write_private(folder / f"{peer_id}{SUFFIX}", data)


def files_in(folder: Path) -> list[Path]:
    """Return the files of evidence about servers, at most MAX_FILES, by name."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)[:MAX_FILES]
    except OSError:
        return []


def _forget_oldest(folder: Path) -> None:
    newest = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    num_bytes = 0
    for place, path in enumerate(newest):
        num_bytes += path.stat().st_size
        if place >= MAX_FILES or num_bytes > MAX_BYTES:
            path.unlink()
