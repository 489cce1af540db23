"""Remembers, by model name, which revisions have answered a client and which publishers it believes.

A revision that has answered takes precedence over revisions served later under the name (`UsedRevisions`).

A user pins a publisher as MODEL=PEER_ID, or as PEER_ID for every model without a pin of its own (`KnownPublishers`).
Without a pin, the publisher of the first published model that answered under a name is remembered for that name. Until
then, models of any publisher or none are used under the name. Apart from `on_new`, the module is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from swarm_protocol import limits
from swarm_protocol.checks import check_name
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import check_peer_id

from swarm.newest_items import NewestItems

MAX_USED_MODELS = 256
MAX_REVISIONS = 4
"""Maximum revisions that are remembered for one model."""

Used = Mapping[str, Sequence[str]]
"""Digests of revisions, by the model's name."""

MAX_REMEMBERED = 256

PublisherStanding = Literal["pinned", "remembered", "new", "unpublished"]
"""The reason to believe a model's publisher: the user pinned it, it was used before, or there is none yet."""

ANY = ""
"""The name under which publishers of every model are pinned."""


def parse_publisher(text: str) -> tuple[str, str]:
    """Split `[MODEL=]PEER_ID` into the model's name, or ANY, and the publisher. Raises ConfigError."""
    model, _, peer_id = text.rpartition("=")
    try:
        if "=" in text:
            check_name(model, "model")
        return model, check_peer_id(peer_id)
    except ValueError as error:
        raise ConfigError(
            f"{text!r:.200} is not a publisher: {error}", remedy="write MODEL=PEER_ID, or PEER_ID for every model"
        ) from error


class KnownPublishers:
    """The publishers that a client knows. `pinned` are texts for `parse_publisher`. `remembered` are the publishers of
    an earlier process, by model; `on_new` is called with all of them when one is added. The object is used only in the
    client's event loop.

    Raises ConfigError for an invalid pin, and ValueError for an invalid remembered name or publisher.
    """

    def __init__(
        self,
        pinned: Sequence[str] = (),
        remembered: Mapping[str, str] | None = None,
        on_new: Callable[[Mapping[str, str]], None] | None = None,
    ) -> None:
        if isinstance(pinned, str):
            raise ConfigError(
                "publishers is one publisher and not a list of them", remedy=f"give publishers=[{pinned!r:.200}]"
            )
        if not (isinstance(pinned, Sequence) and all(isinstance(each, str) for each in pinned)):
            raise ConfigError(f"publishers is {pinned!r:.80}", remedy='give publishers=["[MODEL=]PEER_ID"]')
        self._pinned: dict[str, set[str]] = {}
        for model, peer_id in map(parse_publisher, pinned):
            self._pinned.setdefault(model, set()).add(peer_id)
        self._remembered = NewestItems[str, str](MAX_REMEMBERED)
        self._on_new = on_new
        for model, peer_id in (remembered or {}).items():
            self._add(model, peer_id)

    def pinned(self, model: str) -> frozenset[str]:
        """Return the only publishers of a model that the user accepts. An empty set means any."""
        return frozenset(self._pinned.get(model) or self._pinned.get(ANY) or ())

    def believed(self, model: str) -> frozenset[str]:
        """Return the only believed publishers of a model. An empty set means that there is no reason to prefer one
        yet."""
        remembered = self._remembered.get(model)
        return self.pinned(model) or (frozenset((remembered,)) if remembered else frozenset())

    def standing(self, model: str, publisher: str) -> PublisherStanding:
        """Return why `publisher`, "" for none, is believed about the model."""
        if not publisher:
            return "unpublished"
        if publisher in self.pinned(model):
            return "pinned"
        return "remembered" if self._remembered.get(model) == publisher else "new"

    def answered(self, model: str, publisher: str) -> None:
        """Remember the publisher of a model that has answered, unless one is pinned or remembered."""
        if not self.believed(model):
            self._add(model, publisher)
            if self._on_new is not None:
                self._on_new(self._remembered)

    def _add(self, model: str, publisher: str) -> None:
        self._remembered[check_name(model, "model")] = check_peer_id(publisher)


class UsedRevisions:
    """The revisions of models that have answered a client. Raises ValueError for bad names.

    `used` are the revisions of an earlier process. `on_new` is called with all of them when one is added. The object is
    used only in the client's event loop.
    """

    def __init__(self, used: Used | None = None, on_new: Callable[[Used], None] | None = None) -> None:
        self._used = NewestItems[str, list[str]](MAX_USED_MODELS)
        self._on_new = on_new
        for model, digests in (used or {}).items():
            for digest in digests:
                self._add(model, digest)

    def of(self, model: str) -> Sequence[str]:
        """Return the digests of a model's used revisions, in the order of their first use."""
        return self._used.get(model, ())

    def add(self, model: str, digest: str) -> None:
        """Record that an answer came from the revision."""
        if digest in self.of(model):
            return
        self._add(model, digest)
        if self._on_new is not None:
            self._on_new(self._used)

    def _add(self, model: str, digest: str) -> None:
        check_name(model, "model")
        check_name(digest, "revision", max_bytes=limits.MAX_REVISION_BYTES)
        self._used[model] = [*self.of(model), digest][-MAX_REVISIONS:]
