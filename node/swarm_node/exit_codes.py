"""What becomes of an error that ends a command: a line that a person can act on, and an exit code.

Exit codes: 1 it cannot be done, 70 a bug.
"""

from __future__ import annotations

from swarm_protocol.errors import SwarmError

from swarm_node import home, logs

EXIT_FAILURE = 1
EXIT_BUG = 70


def told(error: Exception) -> SwarmError:
    """`error` as something a person can act on; the traceback of a bug is kept in a file that the line names."""
    if isinstance(error, SwarmError):
        return error
    explained = home.explain(error, "use", option="") if isinstance(error, OSError) else None
    if explained is not None:
        return explained
    path = logs.keep_traceback(error)
    return SwarmError(
        f"unexpected {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}",
        remedy=f"this is a bug; please report it with {path}",
    )


def exit_code(error: Exception) -> int:
    return EXIT_FAILURE if isinstance(error, SwarmError | OSError) else EXIT_BUG
