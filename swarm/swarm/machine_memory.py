"""The memory of the machine or container in which this process runs. It has no state."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # version 2


def total_memory() -> int:
    """Return the total bytes, as `machine_memory`, and without psutil: each client asks as it starts."""
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_bytes = _of_container("max")
    return total_bytes if limit_bytes is None else min(total_bytes, limit_bytes)


def machine_memory() -> tuple[int, int]:
    """Return free and total bytes. A container's own memory limit counts if there is one."""
    import psutil  # noqa: PLC0415 - takes 30 ms, which clients need not wait for

    found = psutil.virtual_memory()
    limit_bytes, used_bytes = _of_container("max"), _of_container("current")
    if limit_bytes is None or used_bytes is None:
        return found.available, found.total
    return min(found.available, max(0, limit_bytes - used_bytes)), min(found.total, limit_bytes)


def _of_container(what: str) -> int | None:
    """Return a number of the container's memory, or None if it has no such number, or "max"."""
    try:
        return int((CGROUP / f"memory.{what}").read_text())
    except (OSError, ValueError):
        return None
