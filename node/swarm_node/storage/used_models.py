"""Remembers across restarts which models have answered the clients of a home, and who published them.

    HOME/revisions.json    {"network_id": …, "used": {MODEL: [REVISION, …], …}}        (see `UsedRevisions`)
    HOME/publishers.json   {"network_id": …, "publishers": {MODEL: PEER_ID, …}}        (see `KnownPublishers`)

If a file is missing, broken or foreign, the home only loses this memory, and believes the next publisher it uses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from swarm.client.catalog import MAX_REVISIONS, MAX_USED_MODELS, Used, UsedRevisions
from swarm.client.publishers import MAX_REMEMBERED, KnownPublishers
from swarm_protocol import limits

from swarm_node.storage.home import read_json, replace_json

MAX_USED_BYTES = 2 * MAX_USED_MODELS * (limits.MAX_NAME_BYTES + MAX_REVISIONS * limits.MAX_REVISION_BYTES)
"""MAX_USED_MODELS with the longest names, twice over."""
MAX_PUBLISHERS_BYTES = 2 * MAX_REMEMBERED * (limits.MAX_NAME_BYTES + 64)
"""MAX_REMEMBERED with the longest names, twice over."""

V = TypeVar("V")

logger = logging.getLogger(__name__)


def used_in(path: Path, network_id: str) -> UsedRevisions:
    """Return the used revisions in the file at `path` for that network; later uses are written there."""
    memory = _Memory(path, network_id, "used", "which models were used", MAX_USED_BYTES)

    def checked(used: Any) -> Used:
        read = {name: list(digests) for name, digests in used.items()}
        UsedRevisions(read)
        return read

    return UsedRevisions(memory.read(checked), memory.keep)


def publishers_in(path: Path, network_id: str, pinned: Iterable[str]) -> KnownPublishers:
    """Return the publishers in the file at `path` for that network, and the pinned ones; later ones are written there.

    Raises ConfigError for a pin that is none.
    """
    memory = _Memory(path, network_id, "publishers", "who publishes which model", MAX_PUBLISHERS_BYTES)

    def checked(remembered: Any) -> dict[str, str]:
        read = dict(remembered)
        KnownPublishers(remembered=read)
        return read

    return KnownPublishers(pinned, memory.read(checked), memory.keep)


class _Memory:
    """One value by the name of a model, in a JSON file of one network. `what` names it in warnings."""

    def __init__(self, path: Path, network_id: str, key: str, what: str, max_bytes: int) -> None:
        self._path = path
        self._network_id = network_id
        self._key = key
        self._what = what
        self._max_bytes = max_bytes

    def keep(self, value: Mapping[str, object]) -> None:
        """Write `value`. A disk that refuses is a warning."""
        try:
            replace_json(self._path, {"network_id": self._network_id, self._key: value})
        except OSError as error:
            logger.warning("cannot remember in %s %s: %s", self._path, self._what, error)

    def read(self, checked: Callable[[Any], Mapping[str, V]]) -> Mapping[str, V]:
        """Return the value, which `checked` reads and refuses by an error; empty if there is none that is intact."""
        try:
            data = read_json(self._path, max_bytes=self._max_bytes)
            if data is None or data["network_id"] != self._network_id:
                return {}
            return checked(data[self._key])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            logger.warning("%s is lost with %s: %s", self._what, self._path, error)
            return {}
