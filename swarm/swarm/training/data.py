"""A run's text as numbered samples: which bytes sample 4711 is, the same on every replica.

Files are read once, wholly, into bounded memory. What happens to them on the disk afterwards cannot change a sample;
a file that changes or vanishes while it is read is an IntegrityError that names it. Nothing here has mutable state,
so any thread may read batches.

Shapes: B samples, T window_tokens.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor

from swarm.training.permutation import permute
from swarm.training.run_config import END_OF_TEXT, DataConfig

MAX_CORPUS_BYTES = 1 << 28
"""All of a corpus is held in memory: enough for small runs, and a bound for a mistyped folder."""

VALIDATION_SHARE = 16
"""One file in so many, by the hash of its path, is held out."""

# Packages that distributions leave out, split off or patch, and tests: without them, machines with the same
# Python version more often have the same corpus. Files that start with _sysconfigdata describe one build.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "distutils", "ensurepip"}
    | {"site-packages", "dist-packages", "__pycache__"}
)
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")

ByteArray: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByteCorpus:
    """Byte-level text, cut into windows. Made by `load`; `digest` names its content and split.

    Sample `s` is window `permutation(seed, epoch)[s mod num_samples]`, with epoch `s div num_samples`: each window once
    an epoch, in an order that depends on nothing but the seed.
    """

    digest: str
    seed: int
    window_tokens: int
    train_bytes: ByteArray
    validation_bytes: ByteArray

    @classmethod
    def load(cls, config: DataConfig, *, seed: int, folder: Path | None = None) -> ByteCorpus:
        """Read `config.source`, or `folder` in its place. Blocks, for about 0.1 s for the standard library.

        Raises IntegrityError if the content is not what `config.digest` pins, or changes while it is read, and
        ConfigError if there is too little or too much of it.
        """
        root = folder or Path(sysconfig.get_path("stdlib"))
        files = _read(root)
        digest = _digest(files)
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
    def num_samples(self) -> int:
        """Windows in one epoch. Neighbours share one byte, so that every byte but the first is once a target."""
        return (self.train_bytes.size - 1) // self.window_tokens

    def batch(self, sample_ids: Sequence[int]) -> Tensor:
        """int64 [B, T+1]: of each row, the first T are inputs and the last T targets."""
        id_B = np.asarray(sample_ids, dtype=np.int64)
        if id_B.size and id_B.min() < 0:
            raise ValueError("a sample id cannot be negative")
        epoch_B, place_B = np.divmod(id_B, self.num_samples)
        window_B = np.empty_like(id_B)
        for epoch in np.unique(epoch_B):
            now_B = epoch_B == epoch
            window_B[now_B] = permute(place_B[now_B], self.num_samples, seed=self.seed, epoch=int(epoch))
        return _windows(self.train_bytes, window_B, self.window_tokens)

    def validation_batch(self, start: int, num_windows: int) -> Tensor:
        """int64 [B, T+1]: windows `start`... of the held-out files, in order; fewer, perhaps none, at their end."""
        total = (self.validation_bytes.size - 1) // self.window_tokens
        window_B = np.arange(start, min(start + num_windows, total), dtype=np.int64)
        return _windows(self.validation_bytes, window_B, self.window_tokens)


def _windows(data: ByteArray, window_B: NDArray[np.int64], window_tokens: int) -> Tensor:
    offset_T = np.arange(window_tokens + 1, dtype=np.int64)
    return torch.from_numpy(data[window_B[:, None] * window_tokens + offset_T].astype(np.int64))


def _read(root: Path) -> list[tuple[str, bytes]]:
    """Names and contents of the Python files under `root`, sorted by name."""
    files, total = [], 0
    for name, path in sorted(_find(root)):
        data = _read_whole(path)
        total += len(data)
        if total > MAX_CORPUS_BYTES:
            raise ConfigError(f"under {root} are over {MAX_CORPUS_BYTES} bytes of text", remedy="name a smaller folder")
        files.append((name, data))
    return files


def _find(root: Path) -> Iterator[tuple[str, Path]]:
    """Links are skipped: they may lead anywhere."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [each for each in subfolders if each not in _SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and not name.startswith(_SKIPPED_FILES) and not path.is_symlink():
                yield path.relative_to(root).as_posix(), path


def _read_whole(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(MAX_CORPUS_BYTES + 1)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}", remedy="restore the file") from error
    if len(data) != size:
        raise IntegrityError(f"{path} changed while it was read", remedy="start again once nothing writes to it")
    return data


def _digest(files: list[tuple[str, bytes]]) -> str:
    """Over names and lengths too: names decide the split, lengths where one file ends."""
    digest = hashlib.blake2b(digest_size=32)
    for name, data in files:
        # a name need not be text
        encoded = os.fsencode(name)
        digest.update(len(encoded).to_bytes(8, "little") + encoded + len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _is_held_out(name: str) -> bool:
    return hashlib.blake2b(os.fsencode(name), digest_size=1).digest()[0] % VALIDATION_SHARE == 0


def _join(documents: Iterable[bytes]) -> ByteArray:
    return np.frombuffer(b"".join(data + bytes([END_OF_TEXT]) for data in documents), dtype=np.uint8)
