"""The revisions of models that have answered the clients of a home, kept across restarts (see `UsedRevisions`).

    HOME/revisions.json   {"network_id": …, "used": {MODEL: [REVISION, …], …}}

If the file is missing, broken or foreign, the home only loses this memory.
"""

from __future__ import annotations

import logging
from pathlib import Path

from swarm.client.catalog import MAX_REVISIONS, MAX_USED_MODELS, Used, UsedRevisions
from swarm_protocol import limits

from swarm_node.storage.home import read_json, replace_json

MAX_FILE_BYTES = 2 * MAX_USED_MODELS * (limits.MAX_NAME_BYTES + MAX_REVISIONS * limits.MAX_REVISION_BYTES)
"""MAX_USED_MODELS with the longest names, twice over."""

logger = logging.getLogger(__name__)


def used_in(path: Path, network_id: str) -> UsedRevisions:
    """Return the used revisions in the file at `path` for that network; later uses are written there."""

    def keep(used: Used) -> None:
        try:
            replace_json(path, {"network_id": network_id, "used": used})
        except OSError as error:
            logger.warning("cannot remember in %s which models were used: %s", path, error)

    return UsedRevisions(_read(path, network_id), keep)


def _read(path: Path, network_id: str) -> Used:
    try:
        data = read_json(path, max_bytes=MAX_FILE_BYTES)
        if data is None or data["network_id"] != network_id:
            return {}
        used = {name: list(digests) for name, digests in data["used"].items()}
        UsedRevisions(used)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning("which models were used is lost with %s: %s", path, error)
        return {}
    return used
