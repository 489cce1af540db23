"""Compiles loops with numba, once on each machine."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MAX_WAIT_S = 20.0
"""Time to wait for another process that compiles a function, which takes a second or two. Then this process compiles
it, too."""
_RETRY_S = 0.02


def compiled(function: Any, signature: Any, **options: Any) -> Any:
    """Return `function` compiled for `signature`, without the GIL. It may come from numba's cache, which is beside the
    function's file, or the user's if that is not writable. Of processes that start together one compiles, and the
    others wait for it. Raises ImportError if numba is missing, or does not support this Python or numpy."""
    import numba  # noqa: PLC0415 (a third of a second)

    options |= {"nogil": True, "error_model": "numpy"}
    try:
        with _turn_to_compile(function.__code__.co_filename):
            return numba.njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):  # the cache cannot be written
        return numba.njit(signature, **options)(function)


@contextmanager
def _turn_to_compile(path: str) -> Iterator[None]:
    """Hold a lock on the source file at `path`; go on without it if it cannot be locked, or after MAX_WAIT_S."""
    until_s = time.monotonic() + MAX_WAIT_S
    with Path(path).open("rb") as source:
        with suppress(OSError):  # a file system without locks
            while time.monotonic() < until_s:
                with suppress(BlockingIOError):
                    fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_RETRY_S)
        yield
