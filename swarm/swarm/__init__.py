"""Swarm: volunteers lend machines to train and to serve language models together, without a central server.

    from swarm import Client

    with Client(peers=["/ip4/…/p2p/…"]) as client:
        for token in client.generate(prompt="def add(a, b):", model="my-model", max_tokens=64):
            print(token.text, end="", flush=True)

    from swarm import Trainer

    with Trainer("run.toml", peers=["/ip4/…/p2p/…"]) as trainer:
        for step in trainer:
            print(step.outer_step, step.loss, step.digest)

These names are loaded when first used: torch comes with `Trainer`, and with a client's calls with tensors, and the
packages below (`swarm.network`, `swarm.training`, …) must start without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm.client import (
        AsyncClient,
        Client,
        Generation,
        Grammar,
        ModelStatus,
        OtherRevision,
        SamplingParams,
        Token,
        UsedRevisions,
    )
    from swarm.trainer import Trainer

__all__ = [
    "AsyncClient",
    "Client",
    "Generation",
    "Grammar",
    "ModelStatus",
    "OtherRevision",
    "SamplingParams",
    "Token",
    "Trainer",
    "UsedRevisions",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'swarm' has no attribute {name!r}")
    return getattr(importlib.import_module("swarm.trainer" if name == "Trainer" else "swarm.client"), name)
