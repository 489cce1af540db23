"""A pseudo-random order of n things of which any one place can be computed alone.

A Feistel network over the smallest even number of bits that holds n, walked until the result is below n
(Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 4). Integer arithmetic only, so every machine agrees;
it is no cipher, and need not be. No state.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 4


def permute(index_B: NDArray[np.uint64], num_items: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where a permutation of range(num_items) takes each index: a bijection for each (seed, epoch)."""
    half_bits = np.uint64(max(1, -(-(num_items - 1).bit_length() // 2)))
    keys = mix(mix(np.array([seed], dtype=np.uint64)) + np.uint64(epoch)) + np.arange(_NUM_ROUNDS, dtype=np.uint64)
    keys = mix(keys)
    result_B = _feistel(index_B, keys, half_bits)
    # the domain is under four times num_items, so few walks are long
    while (outside_B := result_B >= num_items).any():
        result_B[outside_B] = _feistel(result_B[outside_B], keys, half_bits)
    return result_B.astype(np.int64)


def _feistel(index_B: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: np.uint64) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left_B, right_B = index_B >> half_bits, index_B & mask
    for key in keys:
        left_B, right_B = right_B, left_B ^ (mix(right_B + key) & mask)
    return (left_B << half_bits) | right_B


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's output function (Steele, Lea and Flood 2014). uint64 arrays wrap around silently."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
