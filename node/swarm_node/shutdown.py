"""The request to leave: who asked, and how much time the work in flight gets.

Signals, the control socket and the end of the parent process request it; the daemon and its role obey. The first
request starts a drain: the node takes nothing new and finishes what is in flight within a grace period. A second
request, or `force`, ends that period. The daemon's task owns what follows; these are only the flags that others may
read.

The parent process is watched through standard input: however the parent died, the kernel closes its end. A thread
reads, so that any kind of standard input will do and a busy event loop hides nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

CTRL_C = "Ctrl-C"

FORCED_S = 0.5
"""Time for a role that is told to end at once, and has nothing in flight, to return by itself."""


class Shutdown:
    """`leaving` is set once the node should leave, `forced` once it should do so without finishing anything.

    `finished` is set once the role has nothing left in flight. `grace_s` is the time that work in flight gets; it is 0
    before there is any.
    """

    def __init__(self) -> None:
        self.leaving = asyncio.Event()
        self.forced = asyncio.Event()
        self.finished = asyncio.Event()
        self.grace_s = 0.0
        self.reason = ""

    def request(self, reason: str) -> None:
        """Start to drain; a second request forces."""
        if self.leaving.is_set():
            self.forced.set()
        else:
            self.reason = reason
            self.leaving.set()

    async def wait(self, seconds: float) -> bool:
        """Wait until the node should leave, at most `seconds`; return whether it should."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.leaving.wait()
        return self.leaving.is_set()

    def force(self, reason: str) -> None:
        """Leave without finishing what is in flight."""
        self.reason = self.reason or reason
        self.leaving.set()
        self.forced.set()


@contextmanager
def signals_to(shutdown: Shutdown) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and the end of the terminal into requests to leave.

    A third signal gets the default action, in case the node is stuck.
    """
    loop = asyncio.get_running_loop()
    handled = {signal.SIGINT: CTRL_C, signal.SIGTERM: "SIGTERM"}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup the node outlives the terminal
        handled[signal.SIGHUP] = "the terminal is gone"

    def arrived(number: signal.Signals) -> None:
        shutdown.request(handled[number])
        if shutdown.forced.is_set():
            restore()

    def restore() -> None:
        for number in handled:
            loop.remove_signal_handler(number)

    for number in handled:
        loop.add_signal_handler(number, arrived, number)
    try:
        yield
    finally:
        restore()


LIMIT_S = 15.0  # more than a forced leave takes; the parent is not there to kill a node that is stuck
EXIT_ORPHANED = 1


def watch_stdin(ended: Callable[[], None], *, limit_s: float = LIMIT_S) -> None:
    """Call `ended` from another thread when standard input ends, and end the process `limit_s` later if it is still
    there then."""
    threading.Thread(target=_watch, args=(ended, limit_s), name="parent watch", daemon=True).start()


def _watch(ended: Callable[[], None], limit_s: float) -> None:
    # None: it was closed before the start. What it contains is not for the node.
    with suppress(OSError):  # a terminal that hung up, or input that cannot be read: the parent is gone as well
        while sys.stdin is not None and os.read(sys.stdin.fileno(), 4096):
            pass
    ended()
    time.sleep(limit_s)
    os._exit(EXIT_ORPHANED)
