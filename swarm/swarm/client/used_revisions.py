"""The revisions of models that a client has had answers from, which go before others of the same name.

In the order of their first use: a newcomer that served while the first was gone does not keep the name. Touched only
from its client's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from swarm_protocol import limits
from swarm_protocol.checks import check_name

MAX_MODELS = 256
MAX_REVISIONS = 4
"""Of one model."""

Used = Mapping[str, Sequence[str]]
"""Digests by a model's name."""


class UsedRevisions:
    """`used` in an earlier life; `on_new` is told all of them when one is added. Raises ValueError for bad names."""

    def __init__(self, used: Used | None = None, on_new: Callable[[Used], None] | None = None) -> None:
        self._used: dict[str, list[str]] = {}
        self._on_new = on_new
        for model, digests in (used or {}).items():
            for digest in digests:
                self._add(model, digest)

    def of(self, model: str) -> Sequence[str]:
        """The one used first comes first."""
        return self._used.get(model, ())

    def add(self, model: str, digest: str) -> None:
        """An answer came from it."""
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
        if len(self._used) > MAX_MODELS:
            del self._used[next(iter(self._used))]
