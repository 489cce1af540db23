"""What a node allows a server of a model. No state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

from swarm.network.phases import FaultHook, no_faults

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """`kv_bytes` of cache are shared by all sessions; a session that says nothing for `idle_s` is ended.

    Raises ConfigError for values that allow nothing.
    """

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kv_bytes: int = 2**30
    max_sessions: int = 64
    max_step_tokens: int = 512
    idle_s: float = 120.0
    faults: FaultHook = field(default=no_faults)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown", remedy=f"use one of {', '.join(DTYPES)}")
        if self.kv_bytes <= 0 or self.max_sessions <= 0 or self.idle_s <= 0:
            raise ConfigError("kv_bytes, max_sessions and idle_s must be above 0")
        if not 1 <= self.max_step_tokens <= limits.MAX_STEP_TOKENS:
            raise ConfigError(f"max_step_tokens must be within 1 and {limits.MAX_STEP_TOKENS}")
