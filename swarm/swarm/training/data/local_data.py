"""What of a run's data is a member's own affair: where it lies, and who hears how far it is. Values only."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarm_protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the tokenizing is: the share of the source that is read, and what has come of it. `waiting`: another
    process on this machine tokenizes the same data, and this one waits for its tokens."""

    share: float
    num_tokens: int
    tokens_per_s: float
    waiting: bool = False


MAX_CACHE_BYTES = 64 << 30

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalData:
    """`path` is the file or folder of a run with source "files", `tokenizer` the directory of one with tokenizer
    "local" (or its tokenizer.json), `cache` where tokens are kept (None: `shared_cache`), `max_cache_bytes` of them:
    beyond that, those go that were used least recently, and never those that are loaded.

    `on_progress` is called now and then while data is made ready, and at the end; not at all if it is there already.
    Once `stop` says so, it is given up.
    """

    path: Path | None = None
    tokenizer: Path | None = None
    cache: Path | None = None
    max_cache_bytes: int = MAX_CACHE_BYTES
    on_progress: OnProgress = lambda _: None
    stop: Callable[[], bool] = lambda: False

    @property
    def cache_folder(self) -> Path:
        """Raises ConfigError."""
        return self.cache or shared_cache()


def shared_cache() -> Path:
    """Where all processes of this user keep tokens, so that data is tokenized once on a machine. Raises ConfigError."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "swarm" / "tokens"
    except RuntimeError:
        raise ConfigError(
            "this user has no home directory to keep tokens in", remedy="name a folder in XDG_CACHE_HOME"
        ) from None


DEFAULT_DATA = LocalData()
