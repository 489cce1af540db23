"""Tokens on disk, cut into windows. Shapes: B samples, T window_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor

from swarm.training.data.corpus import num_windows, windows_of
from swarm.training.data.token_file import TokenFile
from swarm.training.run.run_config import DataConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCorpus:
    """Implements `corpus.Corpus`. A file found damaged is removed, so that the next start makes it anew."""

    tokens: TokenFile
    seed: int
    window_tokens: int

    @classmethod
    def of(cls, tokens: TokenFile, config: DataConfig, *, seed: int, source: str) -> TokenCorpus:
        """`source` is named to the user. Raises IntegrityError if these are not the tokens that `config.digest` pins,
        ConfigError if they are too few."""
        header = tokens.header
        if config.digest and header.digest != config.digest:
            raise IntegrityError(
                f"the tokens of {source} are not the run's: {header.digest[:12]} instead of {config.digest[:12]}",
                remedy="get the same data and the same tokenizer as the run's author, under the same file names",
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
        return self.tokens.header.digest

    @property
    def vocab_size(self) -> int:
        return self.tokens.header.vocab_size

    @property
    def num_samples(self) -> int:
        return num_windows(self.tokens.header.num_train, self.window_tokens)

    def batch(self, sample_ids: Sequence[int]) -> Tensor:
        window_B = windows_of(sample_ids, self.num_samples, self.seed)
        return self._windows([int(window) * self.window_tokens for window in window_B])

    def validation_batch(self, start: int, num_windows: int) -> Tensor:
        header = self.tokens.header
        total = (header.num_validation - 1) // self.window_tokens
        windows = range(start, min(start + num_windows, total))
        return self._windows([header.num_train + window * self.window_tokens for window in windows])

    def _windows(self, starts: Sequence[int]) -> Tensor:
        x_BT = np.empty((len(starts), self.window_tokens + 1), np.int64)
        try:
            for row, first in enumerate(starts):
                x_BT[row] = self.tokens.read(first, self.window_tokens + 1)
        except IntegrityError:
            self.tokens.path.unlink(missing_ok=True)
            raise
        return torch.from_numpy(x_BT)
