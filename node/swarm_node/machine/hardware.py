"""The machine: its device, cores, speeds and memory, and the share of the memory that serving may use.

`swarm_node.machine.probe`, which imports torch, examines the machine of a node that computes. `describe_machine` is for
other nodes. This module does not import torch.

The constants were measured on Linux with a 44M Llama. Python, torch, transformers, numba and libp2p hold about 560 MiB
before the first weight is loaded. Loading, computing and answering take up to 85 MiB besides weights and cache
(`bench/test_bench_serving_memory.py`).
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from swarm.machine_memory import machine_memory
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

from swarm_node.formatting import plural, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Tokens per second through the reference block; 0: not measured."""

    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    training_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        for value in (self.prefill_tokens_per_s, self.decode_tokens_per_s, self.training_tokens_per_s):
            if not (isinstance(value, int | float) and 0 <= value <= limits.MAX_TOKENS_PER_S):
                raise ValueError(f"{value!r} is not a speed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware. `device` is torch's name for the device (`cpu`, `cuda`, `mps`), `device_name` the
    manufacturer's."""

    device: str
    device_name: str
    num_cores: int
    memory_bytes: int
    free_memory_bytes: int
    read_memory: Callable[[], tuple[int, int]] = field(repr=False, compare=False)
    """Return the current free and total bytes."""

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
            return f"{self.device_name}, {plural(self.num_cores, 'core')}, {memory}, speed not measured"
        return (
            f"{self.device_name}, {plural(self.num_cores, 'core')}, {memory}; tokens/s through one block: "
            f"{speeds.prefill_tokens_per_s:.0f} prefill, {speeds.decode_tokens_per_s:.0f} decode, "
            f"{speeds.training_tokens_per_s:.0f} training"
        )


def describe_machine() -> Hardware:
    """Return the processor and its memory. Blocks for a moment."""
    return Hardware.of("cpu", cpu_name(), machine_memory, Speeds())


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0].isprintable() else platform.processor() or platform.machine() or "CPU"


WORKING_BYTES = 96 * 2**20
"""Memory for loading, for computing a step and for libraries, besides the share that grows with the model."""

PROCESS_BYTES = 560 * 2**20
"""Memory of a node before it loads a model: Python, torch, transformers, numba and libp2p."""

LEAST_PROCESS_BYTES = 320 * 2**20
"""The least memory of such a node. A limit that leaves nothing beyond it is refused before slow imports."""

LIMIT_SHARE = 0.9  # share of the allowed memory that the process does not hold yet; the rest is for activations
FREE_SHARE = 0.8  # share of the free memory without a limit; the rest is for activations and the machine's owner
MAX_CACHE_BYTES = 4 * 2**30  # without a limit of the owner
MAX_WAITING_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """Bytes for weights and cache together, the part of these for the cache, and bytes for waiting steps."""

    model_bytes: int
    cache_bytes: int
    waiting_bytes: int = MAX_WAITING_BYTES


def resident_bytes() -> int:
    """Return the resident bytes of this process and its children (the libp2p daemon)."""
    process = psutil.Process()
    total = 0
    for part in (process, *process.children(recursive=True)):
        try:
            total += part.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # the process ended during the count
    return total


def share_of_free(free_bytes: int) -> MemoryShare:
    """Return the share of the free memory. Used if the owner set no limit."""
    model_bytes = int(free_bytes * FREE_SHARE)
    return MemoryShare(model_bytes=model_bytes, cache_bytes=max(1, min(model_bytes, MAX_CACHE_BYTES)))


def share_of_limit(limit_bytes: int, held: int, least_bytes: int = 0) -> MemoryShare:
    """Return what a limit of `limit_bytes` leaves for a model if the process already holds `held` bytes.

    Raises ConfigError if nothing is left to serve with, or less than the `least_bytes` that the model needs.
    """
    left_bytes = int((limit_bytes - held) * LIMIT_SHARE)
    model_bytes = left_bytes - WORKING_BYTES
    waiting_bytes = min(MAX_WAITING_BYTES, max(limits.MAX_MESSAGE_BYTES, (limit_bytes - held - left_bytes) // 2))
    if model_bytes < max(1, least_bytes):
        takes = f"the node itself takes {size(held)} and" if held else "the node"
        left = f"the model needs {size(least_bytes)} more" if least_bytes else "none is left for a model"
        num_mib = math.ceil((held + (WORKING_BYTES + least_bytes) / LIMIT_SHARE) / 2**20)
        raise ConfigError(
            f"of {size(limit_bytes)} of memory {takes} needs {size(int(WORKING_BYTES / LIMIT_SHARE))} to work: {left}",
            remedy=f"allow {num_mib} MiB with --max-memory{'' if least_bytes else ', and what the model takes'}",
        )
    return MemoryShare(model_bytes=model_bytes, cache_bytes=model_bytes, waiting_bytes=waiting_bytes)


def limit_for(model_bytes: int) -> int:
    """Return the limit under which a starting node has `model_bytes` for a model: the inverse of `share_of_limit`."""
    return int((model_bytes + WORKING_BYTES) / LIMIT_SHARE) + PROCESS_BYTES + 1
