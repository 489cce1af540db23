"""Reads the inner optimizer's state as a checkpoint returns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def whole(state: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Return copies of the tensors that `InnerLoop.state` returned, each in one piece."""
    return {key: torch.cat(list(pieces)) for key, pieces in state.items()}
