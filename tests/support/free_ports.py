"""Ports that a test may listen on later."""

from __future__ import annotations

import os
import random
import socket

_given: set[int] = set()


def free_port() -> int:
    """Return a port of 127.0.0.1 below those that systems give to outgoing connections, of which one could take it
    meanwhile. No other call returns it, neither in this worker nor in those beside it."""
    worker, num_workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    while True:
        port = random.randrange(20_000 + int(worker[2:]), 32_000, int(num_workers))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port
