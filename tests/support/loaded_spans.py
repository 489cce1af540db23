"""What the loading of a span depends on, for tests whose servers share spans."""

from __future__ import annotations

from swarm.serving.server.server_options import ServerOptions

_READ = ("device", "dtype", "kv_bytes", "max_step_tokens", "published")


def options_of_load(options: ServerOptions) -> ServerOptions:
    """Return the options that `deployment.load` reads, without the others: equal ones lead to equal spans."""
    return ServerOptions(**{name: getattr(options, name) for name in _READ})
