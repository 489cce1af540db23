"""A run's data as numbered samples, the same on every replica that holds the same data.

Sample `s` is window `permute(seed, epoch)[s mod num_samples]` of the training tokens, with epoch `s div num_samples`:
each window once an epoch, in an order that depends only on the seed.

Shapes: B samples, T window_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor

from swarm.training.data.token_file import TokenHeader, Tokens
from swarm.training.run.run_config import DataConfig
from swarm.training.run.seeded import permute


class TokenStore(Protocol):
    """Training tokens, and validation tokens behind them. Any thread may read."""

    @property
    def header(self) -> TokenHeader: ...

    def read(self, first: int, num_tokens: int) -> Tokens:
        """Return tokens [first, first + num_tokens). Raises IntegrityError if they are no longer what they were."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTokens:
    """Implements `TokenStore` with tokens in memory."""

    header: TokenHeader
    tokens: NDArray[np.uint8]

    def read(self, first: int, num_tokens: int) -> NDArray[Any]:
        return self.tokens[first : first + num_tokens]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Samples of `window_tokens` tokens, in the order of `seed`. Any thread may read batches. `of` checks what it is
    made of."""

    tokens: TokenStore
    seed: int
    window_tokens: int

    @classmethod
    def of(cls, tokens: TokenStore, config: DataConfig, *, seed: int, source: str, remedy: str) -> Corpus:
        """Make the corpus of `tokens`; errors name `source`. Raises IntegrityError with `remedy` if `config.digest`
        pins other tokens, ConfigError if there are too few."""
        header = tokens.header
        if config.digest and header.digest != config.digest:
            raise IntegrityError(
                f"the tokens of {source} are not the run's: {header.digest[:12]} instead of {config.digest[:12]}",
                remedy=remedy,
            )
        for purpose, count in (("train on", header.num_train), ("validate with", header.num_validation)):
            if count <= config.window_tokens:
                raise ConfigError(
                    f"in {source} are only {count} tokens to {purpose}",
                    remedy=f"use more text, or data.window_tokens under {config.window_tokens}",
                )
        return cls(tokens=tokens, seed=seed, window_tokens=config.window_tokens)

    @property
    def digest(self) -> str:
        """The name of the content and its split."""
        return self.tokens.header.digest

    @property
    def vocab_size(self) -> int:
        """All tokens are below it."""
        return self.tokens.header.vocab_size

    @property
    def num_samples(self) -> int:
        """Windows in one epoch."""
        return _num_windows(self.tokens.header.num_train, self.window_tokens)

    def batch(self, sample_ids: Sequence[int]) -> Tensor:
        """int64 [B, T+1]: of each row, the first T are inputs and the last T targets.

        Raises ValueError for a negative id, IntegrityError if the data is no longer what it was.
        """
        window_B = windows_of(sample_ids, self.num_samples, self.seed)
        return self._windows([int(window) * self.window_tokens for window in window_B])

    def validation_batch(self, start: int, num_windows: int) -> Tensor:
        """int64 [B, T+1]: held-out windows from `start` on, in order. There are fewer, perhaps none, at their end."""
        header = self.tokens.header
        total = _num_windows(header.num_validation, self.window_tokens)
        windows = range(start, min(start + num_windows, total))
        return self._windows([header.num_train + window * self.window_tokens for window in windows])

    def _windows(self, starts: Sequence[int]) -> Tensor:
        x_BT = np.empty((len(starts), self.window_tokens + 1), np.int64)
        for row, first in enumerate(starts):
            x_BT[row] = self.tokens.read(first, self.window_tokens + 1)
        return torch.from_numpy(x_BT)


def _num_windows(num_tokens: int, window_tokens: int) -> int:
    """Neighbours share one token, so that every token but the first is a target once."""
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
