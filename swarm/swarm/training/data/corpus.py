"""What training needs of a run's data: numbered samples, the same on every replica that holds the same data.

Sample `s` is window `permute(seed, epoch)[s mod num_samples]`, with epoch `s div num_samples`: each window once an
epoch, in an order that depends only on the seed.

The permutation is a Feistel network over the smallest even number of bits that holds n, applied again until the result
is below n (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 4), so any one place can be
computed alone. It uses integer arithmetic only, so every machine agrees. It need not be a secure cipher. No state.

Shapes: B samples, T window_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the process that tokenizes needs no torch
    from torch import Tensor

_NUM_ROUNDS = 4

VALIDATION_SHARE = 16
"""One document in this many, chosen by hash, is held out."""


def permute(place_B: NDArray[np.int64], num_items: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Apply a permutation of range(num_items) to each place: a bijection for each (seed, epoch)."""
    half_bits = np.uint64(max(1, -(-(num_items - 1).bit_length() // 2)))
    keys = stream(seed, epoch, _NUM_ROUNDS)
    result_B = _feistel(place_B.astype(np.uint64), keys, half_bits)
    # the domain is at most four times num_items, so few repetitions are needed
    while (outside_B := result_B >= num_items).any():
        result_B[outside_B] = _feistel(result_B[outside_B], keys, half_bits)
    return result_B.astype(np.int64)


def stream(seed: int, index: int, num_values: int) -> NDArray[np.uint64]:
    """Pseudo-random numbers that depend only on the arguments: the start of stream `index` of `seed`."""
    seed_1, index_1 = np.array([[seed], [index]], dtype=np.uint64)
    counter_N = np.arange(num_values, dtype=np.uint64)
    return _mix(_mix(_mix(seed_1) + index_1) + counter_N)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's output function (Steele, Lea and Flood 2014): a bijection that scatters. uint64 arithmetic wraps."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel(index_B: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: np.uint64) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left_B, right_B = index_B >> half_bits, index_B & mask
    for key in keys:
        left_B, right_B = right_B, left_B ^ (_mix(right_B + key) & mask)
    return (left_B << half_bits) | right_B


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
