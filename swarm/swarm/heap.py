"""Memory of this process, given back to the system or asked of it at a time that suits."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_MADV_POPULATE_WRITE = 23
"""Linux's constant, since 5.14."""


def give_back() -> None:
    """Return freed memory to the system. While a model is loaded glibc would otherwise keep several times what the
    weights take, in pieces too small for the next tensor."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def uncollected() -> Iterator[None]:
    """Import large libraries without garbage collection, and keep all that is there at the end from later collections.

    Modules stay, and collections that look through their million objects would take a third of an import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def make_resident(address: int, num_bytes: int) -> None:
    """Have the system back this memory now instead of at the first write. Its content stays.

    Callable from any thread while others use the memory; other requests for memory may wait for it. Without effect
    where the system has no such call.
    """
    if sys.platform == "linux":
        begin = address - address % mmap.PAGESIZE
        size = ctypes.c_size_t(address + num_bytes - begin)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), size, _MADV_POPULATE_WRITE)
