"""Sets what Ctrl-C does while a command starts: it ends the process at once and silently, which a shell shows as 130.

KeyboardInterrupt in the middle of an import leaves modules half loaded, and libraries swallow it or report other
errors. So nothing is raised until a command has something to clean up: the system ends the process, also while a
library is loaded, in which Python looks at no signal. The state is the process's handler of SIGINT.

Until `end_process` was called, Ctrl-C prints a traceback. So this module imports `_signal`, which is part of the
interpreter, and not `signal`, whose enumerations take as long to load as Python itself takes to start.
"""

import _signal as signal  # type: ignore[import-not-found]

EXIT_INTERRUPTED = 130


def end_process() -> None:
    """Let Ctrl-C end this process until `raise_in_command`, unless it is ignored, as in a shell's background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_in_command() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again: call it before a command opens what it has to close.

    asyncio cancels its main task at Ctrl-C only if this was called before its loop runs.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
