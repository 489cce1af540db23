"""The limits and settings that a node gives a server of a model. No state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

import torch
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError
from swarm_protocol.manifest_messages import PublishedManifest

from swarm.network.interface import FailpointHook, no_failpoints
from swarm.serving.engine.engine import EngineOptions
from swarm.serving.evidence.server_convictions import ServerConvictions

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16", "int8", "int4"]

DTYPES: Mapping[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}
"""The dtype of the computation, by the kind of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(EngineOptions):
    """The limits and settings of a server, its engine's among them.

    `kv_bytes` of cache are shared by all sessions; a session that sends nothing for `idle_s` is ended. At most
    `max_connections` connections are open. Steps that wait in all sessions together take up to `max_backlog_bytes`,
    three quarters of it for one client. `published` is the manifest that the model's files have to follow; None: the
    one beside them, if there is one. `convictions` is what the process knows of convicted servers; None: the server
    begins with nothing.

    Raises ConfigError for values that allow nothing.
    """

    device: str = "cpu"
    dtype: Dtype = "float32"
    kv_bytes: int = 2**30
    idle_s: float = 120.0
    max_connections: int = 1024
    max_backlog_bytes: int = 256 * 2**20
    published: PublishedManifest | None = None
    convictions: ServerConvictions | None = None
    failpoints: FailpointHook = field(default=no_failpoints)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown", remedy=f"use one of {', '.join(DTYPES)}")
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, int | float) and not value > 0:
                raise ConfigError(f"{limit.name} must be above 0", remedy="use 1 or more")
        if not 1 <= self.max_step_tokens <= limits.MAX_STEP_TOKENS:
            raise ConfigError(f"max_step_tokens = {self.max_step_tokens}", remedy=f"use 1 to {limits.MAX_STEP_TOKENS}")

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that products are computed in."""
        return DTYPES[self.dtype]

    @property
    def bits(self) -> Literal["int8", "int4"] | None:
        """Return what the weights of linear layers are quantized to, if anything."""
        return self.dtype if self.dtype in ("int8", "int4") else None
