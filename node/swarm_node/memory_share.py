"""How much memory a node holds, and what serving may take of what its owner allows: all of the program counts.

Measured on Linux with a 44M Llama: Python, torch, transformers, numba and libp2p hold about 560 MiB before the first
weight; loading, computing and answering take up to 85 MiB beside weights and cache
(`bench/test_bench_serving_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

WORKING_BYTES = 96 * 2**20
"""For loading, for what a step computes and for what libraries keep, beside the share that grows with the model."""

PROCESS_BYTES = 560 * 2**20
"""Of a node that has not started yet: Python, torch, transformers, numba and libp2p."""

TOLD_SHARE = 0.9  # of what the owner allowed and the process does not hold yet; the rest is for activations
FREE_SHARE = 0.8  # of what is free, where the owner said nothing; the rest is also for the machine's owner
MAX_CACHE_BYTES = 4 * 2**30  # where nobody said how much may be used
MAX_WAITING_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Bytes for weights and cache together, of these at most for the cache, and for what waits to be computed."""

    model_bytes: int
    cache_bytes: int
    waiting_bytes: int = MAX_WAITING_BYTES


def held_bytes() -> int:
    """Resident bytes of this process and its children (the libp2p daemon)."""
    process = psutil.Process()
    total = 0
    for part in (process, *process.children(recursive=True)):
        try:
            total += part.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # it ended while we were counting
    return total


def share_of_free(free_bytes: int) -> Share:
    """Where the owner said nothing."""
    model_bytes = int(free_bytes * FREE_SHARE)
    return Share(model_bytes=model_bytes, cache_bytes=max(1, min(model_bytes, MAX_CACHE_BYTES)))


def share_of_told(told_bytes: int, held: int) -> Share:
    """`held` of what was told is in use already. Raises ConfigError if that leaves nothing to serve with."""
    left_bytes = int((told_bytes - held) * TOLD_SHARE)
    model_bytes = left_bytes - WORKING_BYTES
    waiting_bytes = min(MAX_WAITING_BYTES, max(limits.MAX_MESSAGE_BYTES, (told_bytes - held - left_bytes) // 2))
    if model_bytes <= 0:
        raise ConfigError(
            f"of {told_bytes // 2**20} MiB of memory the node itself takes {held // 2**20} MiB and needs "
            f"{WORKING_BYTES // 2**20} MiB to work with; nothing is left for a model",
            remedy="allow more with --max-memory",
        )
    return Share(model_bytes=model_bytes, cache_bytes=model_bytes, waiting_bytes=waiting_bytes)


def told_for(model_bytes: int) -> int:
    """What has to be allowed so that a node that starts has so much for a model: the reverse of `share_of_told`."""
    return int((model_bytes + WORKING_BYTES) / TOLD_SHARE) + PROCESS_BYTES + 1
