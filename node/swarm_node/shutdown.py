"""The request to leave: its reason, and how much time work in flight gets.

Signals, the control socket and the end of the parent process make the request; the daemon and its role obey it. The
first request starts a drain: the node takes nothing new and finishes work in flight within a grace period. A second
request, or `force`, ends that period. The daemon's task acts on these flags; others may read them.

The parent process is watched through standard input: however the parent dies, the kernel closes its end. A thread
reads, so that any kind of standard input works and a busy event loop cannot delay it.
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
"""Seconds for a role that is forced to end, and has nothing in flight, to return by itself."""


class Shutdown:
    """`leaving` is set once the node should leave, `forced` once it should leave without finishing anything.

    `finished` is set once the role has nothing left in flight. `grace_s` is the time in seconds for work in flight; it
    is 0 before there is any.
    """

    def __init__(self) -> None:
        self.leaving = asyncio.Event()
        self.forced = asyncio.Event()
        self.finished = asyncio.Event()
        self.grace_s = 0.0
        self.reason = ""

    def request(self, reason: str) -> None:
        """Start to drain. A second request forces."""
        if self.leaving.is_set():
            self.forced.set()
        else:
            self.reason = reason
            self.leaving.set()

    async def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` until the node should leave. Return whether it should."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.leaving.wait()
        return self.leaving.is_set()

    def force(self, reason: str) -> None:
        """Leave without finishing work in flight."""
        self.reason = self.reason or reason
        self.leaving.set()
        self.forced.set()


@contextmanager
def signals_to(shutdown: Shutdown) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP (the terminal closes) into requests to leave. An ignored SIGHUP stays so.

    The request that forces also restores the default actions, so that one more signal ends a stuck node.
    """
    loop = asyncio.get_running_loop()
    handled = {signal.SIGINT: CTRL_C, signal.SIGTERM: "SIGTERM"}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup the node survives its terminal
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


def ignore_hangup() -> None:
    """Ignore SIGHUP in a process without a terminal, such as a service, since tools such as logrotate send it.

    So do the child processes that it starts afterwards: `systemctl kill` sends it to all processes of a service.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


LIMIT_S = 15.0  # longer than a forced leave takes: no parent is left to kill a stuck node
EXIT_ORPHANED = 1


def watch_stdin(ended: Callable[[], None], *, limit_s: float = LIMIT_S) -> None:
    """Call `ended` from another thread when standard input ends. End the process `limit_s` later if it still runs."""
    threading.Thread(target=_watch, args=(ended, limit_s), name="parent watch", daemon=True).start()


def _watch(ended: Callable[[], None], limit_s: float) -> None:
    # None means closed before the start; the contents do not matter
    with suppress(OSError):  # a terminal that hung up, or unreadable input: the parent is gone too
        while sys.stdin is not None and os.read(sys.stdin.fileno(), 4096):
            pass
    ended()
    time.sleep(limit_s)
    os._exit(EXIT_ORPHANED)
