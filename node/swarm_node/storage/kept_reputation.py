"""What a gateway's spot checks have shown of servers, kept across restarts (see `swarm.trust.reputation`).

    HOME/reputation.json   {"network_id": …, "servers": {PEER_ID: [PASSED, DISPUTED, FAILED_AT, AT], …}}

If the file is missing, broken or foreign, the home only loses this memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from swarm.trust.reputation import MAX_PEERS, Reputation

from swarm_node.storage.home import read_json, replace_json

MAX_FILE_BYTES = MAX_PEERS * 256
"""A peer id and four numbers with all their digits, twice over."""

logger = logging.getLogger(__name__)


def reputation_in(path: Path, network_id: str) -> Reputation:
    """Return the reputation in the file at `path` for that network."""
    try:
        data = read_json(path, max_bytes=MAX_FILE_BYTES)
        if data is None or data["network_id"] != network_id:
            return Reputation()
        return Reputation.from_dict(data["servers"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning("what is known of servers is lost with %s: %s", path, error)
        return Reputation()


def keep(servers: Mapping[str, Sequence[float]], path: Path, network_id: str) -> None:
    """Write what `Reputation.to_dict` returned to the file."""
    try:
        replace_json(path, {"network_id": network_id, "servers": servers})
    except OSError as error:
        logger.warning("cannot remember in %s what is known of servers: %s", path, error)
