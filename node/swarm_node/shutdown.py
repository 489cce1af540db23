"""Whether this node is leaving, and how patiently. Signals and the control socket ask; the daemon and its role obey.

The first request starts a drain: nothing new is taken, what is in flight gets its time. A second one, or `force`, ends
that time. The daemon's task owns what follows; these are only the flags that all others may look at.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Departure:
    """`leaving` is set once the node should leave, `forced` once it should do so without finishing anything.

    `finished` is set once the role has nothing left in flight. `grace_s` is the time that work in flight gets: none
    before there is any.
    """

    def __init__(self) -> None:
        self.leaving = asyncio.Event()
        self.forced = asyncio.Event()
        self.finished = asyncio.Event()
        self.grace_s = 0.0
        self.reason = ""

    def request(self, reason: str) -> None:
        """Start to drain; if that has begun already, force."""
        if self.leaving.is_set():
            self.forced.set()
        else:
            self.reason = reason
            self.leaving.set()

    def force(self, reason: str) -> None:
        """Leave without finishing what is in flight."""
        self.reason = self.reason or reason
        self.leaving.set()
        self.forced.set()


@contextmanager
def signals_to(departure: Departure) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and the end of the terminal into requests to leave. A third one gets the default action,
    should we be stuck."""
    loop = asyncio.get_running_loop()
    handled = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup the node outlives the terminal
        handled[signal.SIGHUP] = "the terminal is gone"

    def arrived(number: signal.Signals) -> None:
        departure.request(handled[number])
        if departure.forced.is_set():
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
