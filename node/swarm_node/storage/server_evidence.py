"""Evidence about servers in a home, one file per server, for `swarm-node evidence verify`. Blocks.

One directory keeps proofs of possession that convict servers, with a subdirectory for each network. A file that cannot
be read causes a warning: other nodes show the same evidence again. Another directory keeps the newest wrong answer of
each server that a gateway's spot checks have found. Such a file contains what a client asked, so only the home's owner
may read it, and it is sent nowhere. Its number and bytes are limited, and the oldest files are deleted first.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from swarm.evidence_folder import SUFFIX, EvidenceFolder, files_in
from swarm_protocol import limits
from swarm_protocol.proof_messages import EvidenceFile
from swarm_protocol.served_evidence_messages import ServedEvidence

from swarm_node.storage.home import NEW_SUFFIX, write_private

logger = logging.getLogger(__name__)

MAX_NETWORKS = 64
"""Networks of one home whose evidence is listed. A home is in one network at a time."""
MAX_ANSWERS = 64
MAX_ANSWER_BYTES = 256 * 2**20


def answers_in(folder: Path) -> list[Path]:
    """Return the files with wrong answers that `keep_answer` has kept, by name."""
    return files_in(folder, MAX_ANSWERS)


def files_of_networks(folder: Path) -> list[Path]:
    """Return the files of evidence against servers, of all networks that this home has been in."""
    try:
        networks = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []
    return [path for network in networks[:MAX_NETWORKS] for path in files_in(network, limits.MAX_SERVER_BANS)]


def convicted_servers(folder: Path, network_id: str) -> EvidenceFolder:
    """Return the subdirectory of `folder` for one network's evidence about servers. So files of other networks do not
    count against this network's limit, and a server may be convicted in several networks."""
    of_network = folder / hashlib.sha256(network_id.encode()).hexdigest()[:16]
    return EvidenceFolder(of_network, "", network_id, max_files=limits.MAX_SERVER_BANS)


def keep_answer(folder: Path, peer_id: str, network_id: str, evidence: bytes) -> None:
    """Keep the ServedEvidence against `peer_id`, replacing an earlier one. A failing disk only causes a warning."""
    wrapped = ServedEvidence.from_bytes(evidence).evidence().to_bytes()
    data = EvidenceFile(network_id=network_id, run=b"", evidence=wrapped).to_bytes()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in folder.glob(f"*{NEW_SUFFIX}"):  # by a process that was killed
            left.unlink()
        write_private(folder / f"{peer_id}{SUFFIX}", data)
        _forget_oldest(folder)
    except OSError as error:
        logger.warning("cannot keep evidence against %s in %s: %s", peer_id, folder, error)


def _forget_oldest(folder: Path) -> None:
    newest = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    num_bytes = 0
    for place, path in enumerate(newest):
        num_bytes += path.stat().st_size
        if place >= MAX_ANSWERS or num_bytes > MAX_ANSWER_BYTES:
            path.unlink()
