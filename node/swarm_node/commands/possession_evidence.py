"""What `swarm-node evidence` says of a file about a server's wrong proof: it proves itself, offline."""

from __future__ import annotations

import time
from pathlib import Path

from swarm.serving.evidence.wrong_possession import check_possession, read_possession
from swarm_protocol.errors import IntegrityError, SwarmError
from swarm_protocol.proof_messages import WRONG_POSSESSION, Evidence, EvidenceFile

from swarm_node.events.emitter import Emitter


def is_of(file: EvidenceFile) -> bool:
    """Return whether the file holds such evidence."""
    try:
        return not file.run and Evidence.from_bytes(file.evidence).kind == WRONG_POSSESSION
    except SwarmError:
        return False


def judge(path: Path, file: EvidenceFile, emitter: Emitter) -> None:
    """Print what the file proves. Raises IntegrityError if it proves nothing."""
    try:
        verdict = check_possession(read_possession(file.evidence), file.network_id)
    except SwarmError as error:
        raise IntegrityError(f"{path} proves nothing: {error.message}") from error
    emitter.emit(
        "convicted_server",
        path=str(path),
        peer_id=verdict.peer_id,
        model=verdict.model,
        reason=verdict.reason,
        until=verdict.until,
        until_day=time.strftime("%Y-%m-%d", time.gmtime(verdict.until)),
    )
