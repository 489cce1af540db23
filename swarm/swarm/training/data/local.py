"""What of a run's data is a member's own affair: where it lies, and who hears how far it is. Values only."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the tokenizing is: the share of the source that is read, and what has come of it."""

    share: float
    num_tokens: int
    tokens_per_s: float


MAX_CACHE_BYTES = 64 << 30

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalData:
    """`path` is the file or folder of a run with source "files", `tokenizer` the directory of one with tokenizer
    "local", `cache` where tokens are kept (None: this user's cache), `max_cache_bytes` of them: beyond that, those go
    that were used least recently, and never those that are loaded.

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
        if self.cache is not None:
            return self.cache
        root = os.environ.get("XDG_CACHE_HOME")
        return (Path(root) if root else Path.home() / ".cache") / "swarm" / "tokens"


DEFAULT_DATA = LocalData()
