"""The publishers of models that have answered the clients of a home, kept across restarts (see `KnownPublishers`).

    HOME/publishers.json   {"network_id": …, "publishers": {MODEL: PEER_ID, …}}

If the file is missing, broken or foreign, the home only loses this memory, and believes the next publisher it uses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from swarm.client.publishers import MAX_REMEMBERED, KnownPublishers
from swarm_protocol import limits

from swarm_node.storage.home import read_json, replace_json

MAX_FILE_BYTES = 2 * MAX_REMEMBERED * (limits.MAX_NAME_BYTES + 64)
"""MAX_REMEMBERED with the longest names, twice over."""

logger = logging.getLogger(__name__)


def publishers_in(path: Path, network_id: str, pinned: Iterable[str]) -> KnownPublishers:
    """Return the publishers in the file at `path` for that network, and the pinned ones; later ones are written there.

    Raises ConfigError for a pin that is none.
    """

    def keep(remembered: Mapping[str, str]) -> None:
        try:
            replace_json(path, {"network_id": network_id, "publishers": remembered})
        except OSError as error:
            logger.warning("cannot remember in %s who publishes which model: %s", path, error)

    return KnownPublishers(pinned, _read(path, network_id), keep)


def _read(path: Path, network_id: str) -> Mapping[str, str]:
    try:
        data = read_json(path, max_bytes=MAX_FILE_BYTES)
        if data is None or data["network_id"] != network_id:
            return {}
        remembered = dict(data["publishers"])
        KnownPublishers(remembered=remembered)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning("who publishes which model is lost with %s: %s", path, error)
        return {}
    return remembered
