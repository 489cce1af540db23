"""Defines what Ctrl-C does while a command starts: it ends the process at once and silently (130 in a shell).

KeyboardInterrupt in the middle of an import leaves modules half loaded, and libraries swallow it or report other
errors. So nothing is raised until a command has something to clean up. The system ends the process even while a library
is loading, when Python does not handle signals. The state is the process's SIGINT handler.

Until `end_process` is called, Ctrl-C prints a traceback. So this module imports `_signal`, which is part of the
interpreter, and not `signal`, whose enumerations take as long to load as Python takes to start.
"""

import _signal as signal  # type: ignore[import-not-found]

EXIT_INTERRUPTED = 130


def end_process() -> None:
    """Let Ctrl-C end this process until `raise_in_command`, unless SIGINT is ignored, as in a shell's background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_in_command() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again. Call it before a command opens resources that it must close.

    asyncio cancels its main task at Ctrl-C only if this was called before its loop runs.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
