"""Remembers across restarts which models have answered the clients of a home, and who published them.

    HOME/revisions.json    {"network_id": …, "used": {MODEL: [REVISION, …], …}}        (see `UsedRevisions`)
    HOME/publishers.json   {"network_id": …, "publishers": {MODEL: PEER_ID, …}}        (see `KnownPublishers`)

If a file is missing, broken or foreign, the home only loses this memory, and believes the next publisher it uses.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swarm.client.publishers import MAX_REMEMBERED, MAX_REVISIONS, MAX_USED_MODELS, KnownPublishers, Used, UsedRevisions
from swarm_protocol import limits

from swarm_node.storage.home import JsonMemory

MAX_USED_BYTES = 2 * MAX_USED_MODELS * (limits.MAX_NAME_BYTES + MAX_REVISIONS * limits.MAX_REVISION_BYTES)
"""MAX_USED_MODELS with the longest names, twice over."""
MAX_PUBLISHERS_BYTES = 2 * MAX_REMEMBERED * (limits.MAX_NAME_BYTES + 64)
"""MAX_REMEMBERED with the longest names, twice over."""


def used_in(path: Path, network_id: str) -> UsedRevisions:
    """Return the used revisions in the file at `path` for that network; later uses are written there."""
    memory = _memory(path, network_id, "used", "which models were used", MAX_USED_BYTES)

    def checked(used: Any) -> Used:
        read = {name: list(digests) for name, digests in used.items()}
        UsedRevisions(read)
        return read

    return UsedRevisions(memory.read(checked) or {}, memory.keep)


def publishers_in(path: Path, network_id: str, pinned: Iterable[str]) -> KnownPublishers:
    """Return the publishers in the file at `path` for that network, and the pinned ones; later ones are written there.

    Raises ConfigError for a pin that is none.
    """
    memory = _memory(path, network_id, "publishers", "who publishes which model", MAX_PUBLISHERS_BYTES)

    def checked(remembered: Any) -> dict[str, str]:
        read = dict(remembered)
        KnownPublishers(remembered=read)
        return read

    return KnownPublishers(pinned, memory.read(checked) or {}, memory.keep)


def _memory(path: Path, network_id: str, key: str, what: str, max_bytes: int) -> JsonMemory:
    return JsonMemory(path=path, owner=("network_id", network_id), key=key, what=what, max_bytes=max_bytes)
