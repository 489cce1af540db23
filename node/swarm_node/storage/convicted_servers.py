"""Evidence in a home that convicts servers: one file for each, which `swarm-node evidence verify` judges.

Files are written whole or not at all. What cannot be read is a warning: other nodes show the same evidence again.
Blocks.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from swarm_protocol import limits
from swarm_protocol.errors import SwarmError
from swarm_protocol.proof_messages import EvidenceFile

from swarm_node.storage.served_evidence import SUFFIX, write_evidence

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = limits.MAX_WRONG_POSSESSION_BYTES + 2**10


def files_in(folder: Path) -> list[Path]:
    """Return the files, at most MAX_SERVER_BANS, by name."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)[: limits.MAX_SERVER_BANS]
    except OSError:
        return []


class ConvictedServersFolder:
    """Implements `ServerEvidenceStore` in `folder`, for one network."""

    def __init__(self, folder: Path, network_id: str) -> None:
        self._folder = folder
        self._network_id = network_id

    def read(self) -> list[bytes]:
        found = []
        for path in files_in(self._folder):
            try:
                with path.open("rb") as file:
                    kept = EvidenceFile.from_bytes(file.read(MAX_FILE_BYTES + 1))
            except (OSError, SwarmError) as error:
                logger.warning("evidence against a server in %s is not used: %s", path, error)
                continue
            if kept.network_id == self._network_id:
                found.append(kept.evidence)
        return found

    def keep(self, peer_id: str, evidence: bytes) -> None:
        data = EvidenceFile(network_id=self._network_id, run=b"", evidence=evidence).to_bytes()
        try:
            write_evidence(self._folder, peer_id, data)
        except OSError as error:
            logger.warning("evidence against %s does not outlive a restart: %s", peer_id, error)

    def forget(self, peer_id: str) -> None:
        with suppress(OSError):
            (self._folder / f"{peer_id}{SUFFIX}").unlink()
