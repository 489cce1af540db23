"""Byte-level text in memory, cut into windows: the default corpus, the standard library's source.

Nothing here has mutable state. Shapes: B samples, T window_tokens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor

from swarm.training.data.byte_text import BYTE_VOCABULARY, END_OF_TEXT
from swarm.training.data.corpus import VALIDATION_SHARE, num_windows, windows_of
from swarm.training.data.python_source import digest_of, read_python, standard_library
from swarm.training.run.run_config import DataConfig

ByteArray: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByteCorpus:
    """Implements `corpus.Corpus`. Made by `load`; a file in VALIDATION_SHARE, by the hash of its path, is held out."""

    digest: str
    seed: int
    window_tokens: int
    train_bytes: ByteArray
    validation_bytes: ByteArray

    @classmethod
    def load(cls, config: DataConfig, *, seed: int, folder: Path | None = None) -> ByteCorpus:
        """Read the standard library, or `folder` in its place. Blocks, for about 0.1 s for the standard library.

        Raises IntegrityError if the content is not what `config.digest` pins, or changes while it is read, and
        ConfigError if there is too little or too much of it.
        """
        root = folder or standard_library()
        files = read_python(root)
        digest = digest_of(files)
        if config.digest and digest != config.digest:
            raise IntegrityError(
                f"the text under {root} is not the run's: {digest[:12]} instead of {config.digest[:12]}",
                remedy="train with the Python version that the run was made with",
            )
        train = _join(data for name, data in files if not _is_held_out(name))
        validation = _join(data for name, data in files if _is_held_out(name))
        for purpose, part in (("train on", train), ("validate with", validation)):
            if part.size <= config.window_tokens:
                raise ConfigError(
                    f"under {root} are only {part.size} bytes of text to {purpose}",
                    remedy=f"use more text, or data.window_tokens under {config.window_tokens}",
                )
        return cls(
            digest=digest,
            seed=seed,
            window_tokens=config.window_tokens,
            train_bytes=train,
            validation_bytes=validation,
        )

    @property
    def vocab_size(self) -> int:
        return BYTE_VOCABULARY

    @property
    def num_samples(self) -> int:
        return num_windows(self.train_bytes.size, self.window_tokens)

    def batch(self, sample_ids: Sequence[int]) -> Tensor:
        return _windows(self.train_bytes, windows_of(sample_ids, self.num_samples, self.seed), self.window_tokens)

    def validation_batch(self, start: int, num_windows: int) -> Tensor:
        total = (self.validation_bytes.size - 1) // self.window_tokens
        window_B = np.arange(start, min(start + num_windows, total), dtype=np.int64)
        return _windows(self.validation_bytes, window_B, self.window_tokens)


def _windows(data: ByteArray, window_B: NDArray[np.int64], window_tokens: int) -> Tensor:
    offset_T = np.arange(window_tokens + 1, dtype=np.int64)
    return torch.from_numpy(data[window_B[:, None] * window_tokens + offset_T].astype(np.int64))


def _is_held_out(name: str) -> bool:
    return hashlib.blake2b(os.fsencode(name), digest_size=1).digest()[0] % VALIDATION_SHARE == 0


def _join(documents: Iterable[bytes]) -> ByteArray:
    return np.frombuffer(b"".join(data + bytes([END_OF_TEXT]) for data in documents), dtype=np.uint8)
