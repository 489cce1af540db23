"""A member's own settings for a run's data: its place, and the callbacks of its preparation. Values only."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarm_protocol.errors import ConfigError

MAX_CACHE_BYTES = 64 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of tokenizing: the share of the source that has been read, and its tokens so far. With `waiting`,
    another process on this machine tokenizes the same data, and this one waits for its tokens."""

    share: float
    num_tokens: int
    tokens_per_s: float
    waiting: bool = False


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalData:
    """The place of a member's data, and the callbacks of its preparation.

    `path` is the file or folder of a run with source "files". `tokenizer` is the directory (or its tokenizer.json) of a
    run with tokenizer "local". Tokens are kept in `cache` (None: `shared_cache`) up to `max_cache_bytes`: beyond that,
    those used least recently are deleted, but never those that are loaded.

    `on_progress` is called from time to time while data is prepared, and at the end; not if the tokens exist already.
    Preparation stops once `stop` returns True.
    """

    path: Path | None = None
    tokenizer: Path | None = None
    cache: Path | None = None
    max_cache_bytes: int = MAX_CACHE_BYTES
    on_progress: OnProgress = lambda _: None
    stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        for name in ("path", "tokenizer", "cache"):
            if isinstance(place := getattr(self, name), str):
                object.__setattr__(self, name, Path(place))

    @property
    def cache_folder(self) -> Path:
        """The folder of token files: the given one, or `shared_cache`. Raises ConfigError."""
        return self.cache or shared_cache()


def shared_cache() -> Path:
    """Return the folder in which all processes of this user keep tokens, so that a machine tokenizes data once. Raises
    ConfigError."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "swarm" / "tokens"
    except RuntimeError:
        raise ConfigError(
            "this user has no home directory to keep tokens in", remedy="set XDG_CACHE_HOME to a folder"
        ) from None


DEFAULT_DATA = LocalData()
