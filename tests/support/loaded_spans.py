"""Loaded spans that several servers of tests share, since nothing changes their weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from swarm.serving.server.deployment import LoadedSpan, ServerOptions, load

_READ = ("device", "dtype", "kv_bytes", "max_step_tokens", "published")
"""The options that `deployment.load` reads: equal ones lead to equal spans."""


def sharing_load() -> Callable[[Path, int, int, ServerOptions], LoadedSpan]:
    """Return a `load` that reads, tries and measures each span once, for any number of servers."""
    load_once = functools.cache(load)

    def shared_load(directory: Path, start: int, end: int, options: ServerOptions) -> LoadedSpan:
        read = ServerOptions(**{name: getattr(options, name) for name in _READ})
        return load_once(directory, start, end, read)

    return shared_load
