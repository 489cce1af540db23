"""A child process that stops within a message: while it is given one, or while it answers."""

from __future__ import annotations

import os
import signal
import struct
from multiprocessing.connection import Connection


def main(fd: int, _memory_bytes: int) -> None:
    with Connection(fd) as parent:
        if os.environ["STALLS"] == "answering":
            parent.recv_bytes()
            os.write(fd, struct.pack("!i", 100) + b"half")
        signal.pause()
