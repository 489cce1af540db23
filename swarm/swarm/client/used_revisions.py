"""The revisions of models that have answered a client: they take precedence over what is served later under a name.

Pure but for `on_new`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from swarm_protocol import limits
from swarm_protocol.checks import check_name

MAX_USED_MODELS = 256
MAX_REVISIONS = 4
"""Bound for one model."""

Used = Mapping[str, Sequence[str]]
"""Digests of revisions, by the model's name."""


class UsedRevisions:
    """The revisions of models that a client has had answers from. Raises ValueError for bad names.

    `used` are those of an earlier process. `on_new` gets all of them when one is added. Touched only from the client's
    event loop.
    """

    def __init__(self, used: Used | None = None, on_new: Callable[[Used], None] | None = None) -> None:
        self._used: dict[str, list[str]] = {}
        self._on_new = on_new
        for model, digests in (used or {}).items():
            for digest in digests:
                self._add(model, digest)

    def of(self, model: str) -> Sequence[str]:
        """Return the digests, the one used first before the others."""
        return self._used.get(model, ())

    def add(self, model: str, digest: str) -> None:
        """Note that an answer came from the revision."""
        if digest in self.of(model):
            return
        self._add(model, digest)
        if self._on_new is not None:
            self._on_new(self._used)

    def _add(self, model: str, digest: str) -> None:
        check_name(model, "model")
        check_name(digest, "revision", max_bytes=limits.MAX_REVISION_BYTES)
        digests = self._used.setdefault(model, [])
        digests.append(digest)
        del digests[:-MAX_REVISIONS]
        if len(self._used) > MAX_USED_MODELS:
            del self._used[next(iter(self._used))]
