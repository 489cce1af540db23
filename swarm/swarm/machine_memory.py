"""The memory of the machine or container in which this process runs. It has no state."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # version 2


def machine_memory() -> tuple[int, int]:
    """Return free and total bytes. A container's own memory limit counts if there is one."""
    import psutil  # noqa: PLC0415 - only once it is asked for, as clients start faster

    found = psutil.virtual_memory()
    try:
        limit_bytes, used_bytes = (int((CGROUP / f"memory.{what}").read_text()) for what in ("max", "current"))
    except (OSError, ValueError):  # no such file, or "max"
        return found.available, found.total
    return min(found.available, max(0, limit_bytes - used_bytes)), min(found.total, limit_bytes)
