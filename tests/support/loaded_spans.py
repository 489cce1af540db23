"""Loaded spans that several servers of tests share: nothing changes their weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from swarm.serving.server.deployment import LoadedSpan, load
from swarm.serving.server.server_options import ServerOptions

_READ = ("device", "dtype", "kv_bytes", "max_step_tokens", "published")


def options_of_load(options: ServerOptions) -> ServerOptions:
    """Return the options that `deployment.load` reads, without the others: equal ones lead to equal spans."""
    return ServerOptions(**{name: getattr(options, name) for name in _READ})


def sharing_load() -> Callable[[Path, int, int, ServerOptions], LoadedSpan]:
    """Return a `load` that reads, tries and measures each span once, for any number of servers."""
    load_once = functools.cache(load)

    def shared_load(directory: Path, start: int, end: int, options: ServerOptions) -> LoadedSpan:
        return load_once(directory, start, end, options_of_load(options))

    return shared_load
