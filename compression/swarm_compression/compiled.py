"""Loops compiled by numba, once for a machine."""

from __future__ import annotations

from typing import Any


def compiled(function: Any, signature: Any, **options: Any) -> Any:
    """Return `function` for `signature`, run without the GIL; compiled, or taken from numba's cache: beside the
    function's file, or the user's where that cannot be written. ImportError where numba is missing or does not support
    this Python or numpy."""
    import numba  # noqa: PLC0415 (a third of a second)

    options |= {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):  # nowhere to write the cache, or no room
        return numba.njit(signature, **options)(function)
