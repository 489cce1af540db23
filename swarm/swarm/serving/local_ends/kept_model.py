"""A setting without torch: the model whose ends a client keeps, where its files are, and how many blocks stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from swarm_protocol.errors import ConfigError
from swarm_protocol.manifest_messages import PublishedManifest

_HUB_ID = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@([A-Za-z0-9_][\w./-]*))?", re.ASCII)

NUM_LAST_BLOCKS = 1
"""Blocks kept before the head: a server that ran the last one would give logits, from which the answer follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedModel:
    """A model as it is served: its revision, and its manifest if it is published. The kept files have to be these."""

    name: str
    revision: str
    published: PublishedManifest | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """A model whose embedding, first `num_first_blocks` blocks, last block, norm and head a client keeps.

    `source` is a directory, or OWNER/NAME[@REVISION] on a hub, from which only the shards with those weights are
    downloaded, into `cache`, from the hub at `endpoint` if it is another than the usual one. `on_progress` hears of the
    bytes that are there and of all that will be. Raises ConfigError for fewer than one block, and for a name on a hub
    without a `cache`.
    """

    source: Path | str
    cache: Path | None = None
    num_first_blocks: int = 1
    endpoint: str | None = None
    on_progress: Callable[[int, int], None] = field(default=lambda _num_bytes, _total_bytes: None)

    def __post_init__(self) -> None:
        if self.num_first_blocks < 1:
            raise ConfigError(
                f"{self.num_first_blocks} blocks are to be kept at home",
                remedy="keep 1 or more: embeddings alone are looked up in the model's own table",
            )
        if self.hub_id is not None and self.cache is None:
            raise ConfigError(
                f"there is no directory {self.source}, and no cache to download it to from a hub",
                remedy="name the model's directory, or give KeptModel(source=…, cache=DIR)",
            )

    @property
    def hub_id(self) -> tuple[str, str] | None:
        """Return the id and the revision on a hub, or None for a directory."""
        match = _HUB_ID.fullmatch(self.source) if isinstance(self.source, str) else None
        if match is None or Path(self.source).exists():
            return None
        return match[1], match[2] or "main"
