"""Ports that a test may listen on later."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a port of 127.0.0.1 below those that systems give to outgoing connections, of which one could take it
    meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
