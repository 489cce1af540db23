"""Memory of this process, given back to the system or asked of it at a time that suits."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MADV_POPULATE_WRITE = 23
"""Linux's constant, since 5.14."""
_MADV_COLLAPSE = 25
"""Linux's constant, since 6.1."""
_HUGE_PAGE_BYTES = 2**21
_OWN_MEMORY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 *(\[heap\])?$")
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")
_READ_ONLY_FILE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ \S+ +/")


def give_back() -> None:
    """Return freed memory to the system. While a model is loaded glibc would otherwise keep several times what the
    weights take, in pieces too small for the next tensor."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_code() -> None:
    """Unmap the pages of libraries' code and constants that have been read so far. Those that are used again come back
    from the system's file cache, without reading the disk.

    To import large libraries and to link compiled loops reads 200 MB of them, of which 45 are used again.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for begin, end in _unchanged_files():
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _unchanged_files() -> list[tuple[int, int]]:
    """Return where files are mapped that are only read, and of which this process has no pages of its own: nothing
    there can be lost."""
    found, bounds = list[tuple[int, int]](), (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := _READ_ONLY_FILE.match(line):
            bounds = (int(match[1], 16), int(match[2], 16))
        elif _MAPPING.match(line):
            bounds = (0, 0)
        elif line.startswith("Anonymous:") and bounds[1] and line.split()[1] == "0":
            found.append(bounds)
    return found


def resident_bytes() -> int:
    """Return how much memory this process has now; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def use_huge_pages() -> None:
    """Put this process's memory into pages of 2 MiB, whose places the processor remembers: with millions of small
    objects it spends an eighth of its time on looking up those of 4 KiB. Their content stays.

    Takes a second for each 100 MiB that are not there yet. What the system cannot do stays as it is.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if match := _OWN_MEMORY.match(line):
            begin = -(-int(match[1], 16) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
            size = int(match[2], 16) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES - begin
            if size > 0:
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_COLLAPSE)


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


@contextmanager
def absent(*packages: str) -> Iterator[None]:
    """Let libraries that are imported meanwhile find that these optional packages are not installed.

    A library keeps what it found, so this is for programs, and for packages that they use by themselves at most.
    Packages that are imported already stay. Others can be imported again afterwards.
    """
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: there is no such module
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def make_resident(address: int, num_bytes: int) -> None:
    """Have the system back this memory now instead of at the first write. Its content stays.

    Callable from any thread while others use the memory; other requests for memory may wait for it. Without effect
    where the system has no such call.
    """
    if sys.platform == "linux":
        begin = address - address % mmap.PAGESIZE
        size = ctypes.c_size_t(address + num_bytes - begin)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), size, _MADV_POPULATE_WRITE)
