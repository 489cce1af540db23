"""Random numbers and permutations that depend only on a run's seed: integer arithmetic, equal on every machine. No
state.

The permutation is a Feistel network over the smallest even number of bits that holds n, applied again until the result
is below n (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 4), so each place is computed
independently. The permutation need not be secure. Shapes: B places, N numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 4


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
    """Return pseudo-random numbers that depend only on the arguments: the start of stream `index` of `seed`."""
    seed_1, index_1 = np.array([[seed], [index]], dtype=np.uint64)
    counter_N = np.arange(num_values, dtype=np.uint64)
    return _mix(_mix(_mix(seed_1) + index_1) + counter_N)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Compute splitmix64's output function (Steele, Lea and Flood 2014): a bijection that scatters. uint64 arithmetic
    wraps."""
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
