"""States that a test makes up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from swarm.training.state.replica_state import ReplicaState


def state_of(theta_N: torch.Tensor, momentum_N: torch.Tensor | None = None, **head: Any) -> ReplicaState:
    """The initial state of these values, but for what `head` says of its manifest; without momentum, if none is
    given."""
    state = ReplicaState.initial(theta_N)
    if momentum_N is not None:
        state = replace(state, momentum_N=momentum_N).hashed_again()
    return with_head(state, **head)


def with_head(state: ReplicaState, **head: Any) -> ReplicaState:
    return replace(state, manifest=replace(state.manifest, **head))
