"""What this machine is and how fast it computes.

Speeds are measured once (by `swarm_node.speed`) and kept in the home's cache for the same device, library versions and
number of threads; memory is read anew each time.

Imports torch, and so takes seconds to import. All functions block; the caller runs them off its event loop.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

from swarm_node import speed
from swarm_node.speed import Speeds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """`device` is torch's name for it (`cpu`, `cuda`, `mps`), `device_name` the maker's."""

    device: str
    device_name: str
    num_cores: int
    memory_bytes: int
    free_memory_bytes: int
    speeds: Speeds

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


def examine(device: str, cache: Path, *, probe: str, threads: int) -> Hardware:
    """Look at the machine. `probe`: `auto` uses what the directory `cache` remembers, `fresh` measures, `off` does not.

    Raises ConfigError if `device` is not there.
    """
    if threads:
        torch.set_num_threads(threads)
    chosen = choose_device(device)
    name = device_name(chosen)
    free_bytes, total_bytes = memory(chosen)
    return Hardware(
        device=chosen,
        device_name=name[: limits.MAX_DEVICE_CHARS],
        num_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        memory_bytes=total_bytes,
        free_memory_bytes=free_bytes,
        speeds=Speeds() if probe == "off" else _remembered(chosen, name, cache / "probe.json", fresh=probe == "fresh"),
    )


def choose_device(wanted: str) -> str:
    """`auto` is the first of CUDA (which ROCm builds also answer to), MPS and CPU that is there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return next(name for name, is_there in there.items() if is_there)
    if not there[wanted]:
        found = " or ".join(name for name, is_there in there.items() if is_there)
        raise ConfigError(
            f"there is no {wanted} device that torch {torch.__version__} can use", remedy=f"give --device {found}"
        )
    return wanted


def device_name(device: str) -> str:
    if device == "cuda":
        return f"{'ROCm' if torch.version.hip else 'CUDA'} {torch.cuda.get_device_name()}"
    if device == "mps":
        return f"MPS {platform.machine()}"
    return _cpu_name()


def memory(device: str) -> tuple[int, int]:
    """Free and total bytes of where `device` computes. A container's own limit counts, where there is one."""
    if device == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return free_bytes, total_bytes
    found = psutil.virtual_memory()
    limit = _container_limit()
    if limit is None:
        return found.available, found.total
    limit_bytes, used_bytes = limit
    return min(found.available, max(0, limit_bytes - used_bytes)), min(found.total, limit_bytes)


def _remembered(device: str, name: str, path: Path, *, fresh: bool) -> Speeds:
    versions = f"torch {torch.__version__} transformers {metadata.version('transformers')}"
    key = f"{device} {name} {versions} threads {torch.get_num_threads()}"
    if not fresh:
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["key"] == key:
                return Speeds(**kept["speeds"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("the remembered speeds in %s are unusable, measuring again: %s", path, error)
    speeds = speed.measure(device)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"key": key, "speeds": asdict(speeds)}), encoding="utf-8")
    part.replace(path)
    return speeds


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0].isprintable() else platform.processor() or platform.machine() or "CPU"


def _container_limit() -> tuple[int, int] | None:
    """The memory limit and use of our cgroup (version 2), in bytes."""
    root = Path("/sys/fs/cgroup")
    try:
        return int((root / "memory.max").read_text()), int((root / "memory.current").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
