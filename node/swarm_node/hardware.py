"""What this machine is, as a node says it of itself: a device, cores, memory, speeds.

Of a node that computes `swarm_node.probe` finds out, with torch. One that does not is told by `survey`, which needs no
torch, as nothing here does.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from swarm_protocol import limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Tokens a second through the reference block; 0 where not measured."""

    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    training_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        for value in (self.prefill_tokens_per_s, self.decode_tokens_per_s, self.training_tokens_per_s):
            if not (isinstance(value, int | float) and 0 <= value <= limits.MAX_TOKENS_PER_S):
                raise ValueError(f"{value!r} is not a speed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """`device` is torch's name for it (`cpu`, `cuda`, `mps`), `device_name` the maker's."""

    device: str
    device_name: str
    num_cores: int
    memory_bytes: int
    free_memory_bytes: int
    read_memory: Callable[[], tuple[int, int]] = field(repr=False, compare=False)
    """Free and total bytes as of now."""

    speeds: Speeds

    @classmethod
    def of(cls, device: str, name: str, read_memory: Callable[[], tuple[int, int]], speeds: Speeds) -> Hardware:
        free_bytes, total_bytes = read_memory()
        return cls(
            device=device,
            device_name=name[: limits.MAX_DEVICE_CHARS],
            num_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
            memory_bytes=total_bytes,
            free_memory_bytes=free_bytes,
            read_memory=read_memory,
            speeds=speeds,
        )

    def __str__(self) -> str:
        memory = f"{self.free_memory_bytes / 2**30:.1f} of {self.memory_bytes / 2**30:.1f} GiB free"
        speeds = self.speeds
        if not speeds.prefill_tokens_per_s:
            return f"{self.device_name}, {self.num_cores} cores, {memory}, speed not measured"
        return (
            f"{self.device_name}, {self.num_cores} cores, {memory}; tokens/s through one block: "
            f"{speeds.prefill_tokens_per_s:.0f} prefill, {speeds.decode_tokens_per_s:.0f} decode, "
            f"{speeds.training_tokens_per_s:.0f} training"
        )


def survey() -> Hardware:
    """The processor and its memory. Blocks for a moment."""
    return Hardware.of("cpu", cpu_name(), machine_memory, Speeds())


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0].isprintable() else platform.processor() or platform.machine() or "CPU"


def machine_memory() -> tuple[int, int]:
    """Free and total bytes. A container's own limit counts, where there is one."""
    found = psutil.virtual_memory()
    limit = _container_limit()
    if limit is None:
        return found.available, found.total
    limit_bytes, used_bytes = limit
    return min(found.available, max(0, limit_bytes - used_bytes)), min(found.total, limit_bytes)


def _container_limit() -> tuple[int, int] | None:
    """The memory limit and use of our cgroup (version 2), in bytes."""
    root = Path("/sys/fs/cgroup")
    try:
        return int((root / "memory.max").read_text()), int((root / "memory.current").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
