"""The line at the foot of a terminal that says how it goes, drawn over itself; a log line now and then elsewhere.

Other lines are written above it. Any thread may call it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TextIO

from swarm_node.sanitizing import clean

EVERY_S = 60.0
"""Between two lines of the same kind where there is no terminal."""

WIPE = "\r\x1b[K"


class LiveLine:
    """Writes to `stream`. What the stream raises goes to the caller."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = ""
        self._due_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def show(self, kind: str, text: str) -> None:
        """`text` takes the place of the one before; without a terminal it is printed if its `kind` is due."""
        with self._lock:
            if self._is_terminal:
                self._shown = text
                self._write(self._drawn())
            elif self._clock() >= self._due_s.get(kind, 0.0):
                self._due_s[kind] = self._clock() + EVERY_S
                self._write(text + "\n")

    def above(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            self._write(f"{WIPE}{text}\n{self._drawn()}" if self._shown else text + "\n")

    def end(self) -> None:
        """Nothing goes on any more that it could tell of."""
        with self._lock:
            if self._shown:
                self._shown = ""
                self._write(WIPE)

    def _drawn(self) -> str:
        # the cursor waits at the line's beginning, so that whatever else writes here does not go on behind it
        return f"{WIPE}{clean(self._shown, self._width() - 1)}\r"

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
