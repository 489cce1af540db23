"""What training needs of a run's data: numbered samples, the same on every replica that holds the same data.

Sample `s` is window `permute(seed, epoch)[s mod num_samples]`, with epoch `s div num_samples`: each window once an
epoch, in an order that depends only on the seed.

Shapes: B samples, T window_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from swarm.training.run.seeded import permute

if TYPE_CHECKING:  # the process that tokenizes needs no torch
    from torch import Tensor

VALIDATION_SHARE = 16
"""One document in this many, chosen by hash, is held out."""


class Corpus(Protocol):
    """Any thread may read batches. `digest` identifies the content and its split. Tokens are below `vocab_size`."""

    @property
    def digest(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def window_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_samples(self) -> int:
        """Windows in one epoch."""

    def batch(self, sample_ids: Sequence[int]) -> Tensor:
        """int64 [B, T+1]: of each row, the first T are inputs and the last T targets.

        Raises ValueError for a negative id, IntegrityError if the data is no longer what it was.
        """

    def validation_batch(self, start: int, num_windows: int) -> Tensor:
        """int64 [B, T+1]: held-out windows from `start` on, in order. There are fewer, perhaps none, at their end."""


def num_windows(num_tokens: int, window_tokens: int) -> int:
    """The number of windows. Neighbours share one token, so that every token but the first is a target once."""
    return max(0, num_tokens - 1) // window_tokens


def windows_of(sample_ids: Sequence[int], num_samples: int, seed: int) -> NDArray[np.int64]:
    """[B]: the window that each sample is. Raises ValueError for a negative id."""
    id_B = np.asarray(sample_ids, dtype=np.int64)
    if id_B.size and id_B.min() < 0:
        raise ValueError("a sample id cannot be negative")
    epoch_B, place_B = np.divmod(id_B, num_samples)
    window_B = np.empty_like(id_B)
    for epoch in np.unique(epoch_B):
        now_B = epoch_B == epoch
        window_B[now_B] = permute(place_B[now_B], num_samples, seed=seed, epoch=int(epoch))
    return window_B
