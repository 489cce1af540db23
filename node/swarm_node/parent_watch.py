"""Ends a node when whoever started it is gone: however that one died, the kernel closes its end of the node's stdin.

A thread reads, so that any kind of stdin will do and a busy event loop hides nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LIMIT_S = 15.0  # more than a forced leave takes; nobody is left to kill a node that is stuck
EXIT_ORPHANED = 1


def watch_stdin(ended: Callable[[], None], *, limit_s: float = LIMIT_S) -> None:
    """Call `ended` from another thread when standard input ends, and end the process `limit_s` later if it is still
    there then."""
    threading.Thread(target=_watch, args=(ended, limit_s), name="tether", daemon=True).start()


def _watch(ended: Callable[[], None], limit_s: float) -> None:
    # None: it was closed before we began. What is said there is not for us.
    with suppress(OSError):  # a terminal that hung up, or what cannot be read at all: nobody is there either
        while sys.stdin is not None and os.read(sys.stdin.fileno(), 4096):
            pass
    ended()
    time.sleep(limit_s)
    os._exit(EXIT_ORPHANED)
