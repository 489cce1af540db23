"""What Ctrl-C does while a command starts: it ends the process at once and silently.

KeyboardInterrupt in the middle of an import leaves modules half loaded, and libraries swallow it or report other
errors. So nothing is raised until a command has something to clean up. Only light modules of the standard library are
imported here. The state is the process's handler of SIGINT.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 130


def end_process() -> None:
    """Let Ctrl-C end this process until `raise_in_command`, unless it is ignored, as in a shell's background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_in_command() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again: call it before a command opens what it has to close.

    asyncio cancels its main task at Ctrl-C only if this was called before its loop runs.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)
