"""The memory of the machine or container in which this process runs. It has no state."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OWN = Path("/proc/self/statm")
GROUPS = Path("/proc/self/cgroup")
CGROUP = Path("/sys/fs/cgroup")


def total_memory() -> int:
    """Return the total bytes, as `machine_memory`, and without psutil: each client asks as it starts."""
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total_bytes, *(limit_bytes for limit_bytes, _ in _limits())])


def machine_memory() -> tuple[int, int]:
    """Return free and total bytes. The memory limits of this process count, and those of its control groups, as a
    container or a service has them."""
    import psutil  # noqa: PLC0415 - takes 30 ms, which clients need not wait for

    found = psutil.virtual_memory()
    free_bytes, total_bytes = found.available, found.total
    for limit_bytes, used_bytes in _limits():
        free_bytes = min(free_bytes, max(0, limit_bytes - used_bytes))
        total_bytes = min(total_bytes, limit_bytes)
    return free_bytes, total_bytes


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the use of this process's address space, if that is limited (`ulimit -v`), and of each
    control group with this process that limits memory, in bytes."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes != resource.RLIM_INFINITY:
        with suppress(OSError):  # not Linux
            yield limit_bytes, int(OWN.read_text().split()[0]) * resource.getpagesize()
    try:
        groups = GROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if not controllers:  # version 2 of control groups
            root, names = CGROUP, ("memory.max", "memory.current")
        elif controllers == "memory":
            root, names = CGROUP / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):  # the limits of all groups above hold, too
            with suppress(OSError, ValueError):  # no limit: none is set, or a container does not see this group
                limit_bytes, used_bytes = (int((folder / name).read_text()) for name in names)
                yield limit_bytes, used_bytes
            if folder == root:
                break
