"""A run's text as numbered samples: which bytes sample 4711 is, the same on every replica.

Files are read once, wholly, into bounded memory. What happens to them on the disk afterwards cannot change a sample;
a file that changes or vanishes while it is read is an IntegrityError that names it. Nothing here has mutable state,
so any thread may read batches.

Shapes: B samples, T window_tokens.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm.training.permutation import permute
from swarm.training.run_config import END_OF_TEXT, DataConfig
from swarm_protocol.errors import ConfigError, IntegrityError

MAX_CORPUS_BYTES = 1 << 28
"""All of a corpus is held in memory: enough for small runs, and a bound for a mistyped folder."""

VALIDATION_SHARE = 16
"""One file in so many, by the hash of its path, is held out."""

# Packages that distributions leave out, split off or patch, and tests: without them, machines with the same
# Python version have the same corpus more often. Names that start with _sysconfigdata describe one build.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "distutils", "ensurepip", "site-packages"}
    | {"dist-packages", "__pycache__"}
)
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize", "turtle.py")

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
        """Read `config.source`, or `folder` instead of it. Blocking: about 0.2 s for the standard library.

        Raises IntegrityError if the content is not what `config.digest` pins, or changes under the reading, and
        ConfigError if there is too little or too much of it.
        """
        root = folder or Path(sysconfig.get_path("stdlib"))
        files = _read(root, _list(root))
        digest = _digest(files)
        if config.digest and digest != config.digest:
            raise IntegrityError(
                f"the text under {root} is not the run's: {digest[:12]} instead of {config.digest[:12]}",
                remedy="train with the Python version that the run was made with",
            )
        held_out = {name for name, _ in files if _is_held_out(name)}
        corpus = cls(
            digest=digest,
            seed=seed,
            window_tokens=config.window_tokens,
            train_bytes=_join(data for name, data in files if name not in held_out),
            validation_bytes=_join(data for name, data in files if name in held_out),
        )
        corpus._check_length(root)
        return corpus

    def _check_length(self, root: Path) -> None:
        for part, size in (("train on", self.train_bytes.size), ("validate with", self.validation_bytes.size)):
            if size <= self.window_tokens:
                raise ConfigError(
                    f"there is too little text under {root} to {part}: {size} bytes for windows of {self.window_tokens}",
                    remedy="use more text or a smaller data.window_tokens",
                )

    @property
    def num_samples(self) -> int:
        """Windows in one epoch. Neighbours share one byte, so that every byte but the first is once a target."""
        return (self.train_bytes.size - 1) // self.window_tokens

    def batch(self, sample_ids: Sequence[int]) -> Tensor:
        """int64 [B, T+1]: of each row, the first T are inputs and the last T targets."""
        id_B = np.asarray(sample_ids, dtype=np.int64)
        window_B = np.empty_like(id_B)
        epoch_B = id_B // self.num_samples
        for epoch in np.unique(epoch_B):
            chosen = epoch_B == epoch
            within = (id_B[chosen] % self.num_samples).astype(np.uint64)
            window_B[chosen] = permute(within, self.num_samples, seed=self.seed, epoch=int(epoch))
        return _windows(self.train_bytes, window_B, self.window_tokens)

    def validation_batch(self, start: int, num_windows: int) -> Tensor:
        """int64 [B, T+1]: windows `start`... of the held-out files, in order; fewer, perhaps none, at their end."""
        total = (self.validation_bytes.size - 1) // self.window_tokens
        window_B = np.arange(start, min(start + num_windows, total), dtype=np.int64)
        return _windows(self.validation_bytes, window_B, self.window_tokens)


def _windows(data: ByteArray, window_B: NDArray[np.int64], window_tokens: int) -> Tensor:
    offset_T = np.arange(window_tokens + 1, dtype=np.int64)
    return torch.from_numpy(data[window_B[:, None] * window_tokens + offset_T].astype(np.int64))


def _list(root: Path) -> list[Path]:
    """Python files under `root`, sorted by their path there. Links are skipped: they may lead anywhere."""

    def wanted(path: Path) -> bool:
        folders = path.relative_to(root).parts[:-1]
        return not _SKIPPED_FOLDERS.intersection(folders) and not path.name.startswith(_SKIPPED_FILES)

    found = [path for path in root.rglob("*.py") if wanted(path) and path.is_file() and not path.is_symlink()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix().encode())


def _read(root: Path, paths: list[Path]) -> list[tuple[str, bytes]]:
    files, total = [], 0
    for path in paths:
        try:
            size = path.stat().st_size
            total += size
            if total > MAX_CORPUS_BYTES:
                raise ConfigError(f"there is more than {MAX_CORPUS_BYTES} bytes of text under {root}", remedy="use less")
            data = path.read_bytes()
        except OSError as error:
            raise IntegrityError(f"{path} cannot be read: {error.strerror}", remedy="restore the file") from error
        if len(data) != size:
            raise IntegrityError(f"{path} changed while it was read", remedy="start again when nothing writes to it")
        files.append((path.relative_to(root).as_posix(), data))
    return files


def _digest(files: list[tuple[str, bytes]]) -> str:
    """Over names and lengths too: the names decide the split, and lengths where one file ends."""
    digest = hashlib.blake2b(digest_size=32)
    for name, data in files:
        encoded = name.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded + len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _is_held_out(name: str) -> bool:
    return hashlib.blake2b(name.encode(), digest_size=1).digest()[0] % VALIDATION_SHARE == 0


def _join(documents: Iterable[bytes]) -> ByteArray:
    return np.frombuffer(b"".join(data + bytes([END_OF_TEXT]) for data in documents), dtype=np.uint8)
