"""Which token comes next: on the client, the same for the same seed on any machine and after any failover.

Draws are counter-based: the n-th token's random number depends on the seed and n only. Legend: V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from swarm_protocol.errors import ConfigError
from torch import Tensor

MAX_TEMPERATURE = 100.0
MAX_STOPS = 16
MAX_STOP_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """`temperature` 0 is greedy; `top_p` 1 and `top_k` 0 cut nothing. Raises ConfigError for values without meaning."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE):
            raise ConfigError(f"temperature is {self.temperature}", remedy=f"use 0 to {MAX_TEMPERATURE:g}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}", remedy="use a number above 0 and up to 1")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}", remedy="use 0 for no limit, or a positive number")
        if abs(self.seed) >= 2**63:
            raise ConfigError(f"seed is {self.seed}", remedy="use a 64-bit number")
        if len(self.stop) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARS for text in self.stop):
            raise ConfigError(
                "stop has too many strings, or an empty or very long one",
                remedy=f"use at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters",
            )


def pick(logits_V: Tensor, sampling: Sampling, index: int) -> int:
    """The token at `index` of the answer. Of equal logits the lower id is taken first."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # from the largest down, so that a temperature near 0 makes the others nothing and not the largest infinite
    scaled_V = (logits_V.double() - logits_V.max()) / sampling.temperature
    sorted_V, ids_V = torch.sort(scaled_V, descending=True, stable=True)
    if sampling.top_k:
        sorted_V, ids_V = sorted_V[: sampling.top_k], ids_V[: sampling.top_k]
    cumulative_V = torch.softmax(sorted_V, dim=0).cumsum(0)
    # the fewest tokens that reach top_p, one at least
    kept = int((cumulative_V < sampling.top_p).sum().clamp(max=len(cumulative_V) - 1)) + 1
    goal = _uniform(sampling.seed, index) * float(cumulative_V[kept - 1])
    return int(ids_V[min(int((cumulative_V[:kept] <= goal).sum()), kept - 1)])


def _uniform(seed: int, index: int) -> float:
    """In [0, 1), with 53 random bits."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
