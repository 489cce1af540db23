"""A run's data as numbered samples, the same on every replica that holds the same data.

Sample `s` is window `permute(seed, epoch)[s mod num_samples]` of the training tokens, with epoch `s div num_samples`:
each window is used once an epoch, in an order that depends only on the seed.

`load_corpus` makes this machine's corpus: in memory (the default, the standard library's source as bytes), from cached
tokens, or tokenized by a worker process. The file name of cached tokens is a digest of what they were made from. Cached
tokens with the digest that the run pins are used without their source, which may be gone or unreachable. Blocks.

Shapes: B samples, T window_tokens.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor

from swarm.training.data.document_files import FileSource
from swarm.training.data.hub import HubSource
from swarm.training.data.local_data import DEFAULT_DATA, LocalData
from swarm.training.data.source import (
    VALIDATION_SHARE,
    DocumentSource,
    PythonSource,
    digest_of,
    read_python,
    standard_library,
)
from swarm.training.data.token_file import TokenFile, TokenHeader, read_header
from swarm.training.data.tokenizer import TokenizerFiles, check_vocabulary
from swarm.training.data.tokenizing import Job, discard, tokenize
from swarm.training.run.run_tables import BYTE_VOCABULARY, END_OF_TEXT, DataConfig
from swarm.training.run.seeded import permute


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTokens:
    """Training tokens in memory, and validation tokens behind them. Like a `TokenFile`, any thread may read them."""

    header: TokenHeader
    tokens: NDArray[np.uint8]

    def read(self, first: int, num_tokens: int) -> NDArray[Any]:
        return self.tokens[first : first + num_tokens]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Samples of `window_tokens` tokens, in the order of `seed`. Any thread may read batches. `of` checks the
    tokens."""

    tokens: MemoryTokens | TokenFile
    seed: int
    window_tokens: int

    @classmethod
    def of(cls, tokens: MemoryTokens | TokenFile, config: DataConfig, *, seed: int, source: str, remedy: str) -> Corpus:
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
                    f"{source} has only {count} tokens to {purpose}",
                    remedy=f"use more text, or data.window_tokens under {config.window_tokens}",
                )
        return cls(tokens=tokens, seed=seed, window_tokens=config.window_tokens)

    @property
    def digest(self) -> str:
        """The digest of the content and its split."""
        return self.tokens.header.digest

    @property
    def vocab_size(self) -> int:
        """Every token is below this number."""
        return self.tokens.header.vocab_size

    @property
    def num_samples(self) -> int:
        """The number of windows in one epoch."""
        return _num_windows(self.tokens.header.num_train, self.window_tokens)

    @property
    def num_validation_windows(self) -> int:
        """The number of held-out windows."""
        return _num_windows(self.tokens.header.num_validation, self.window_tokens)

    def batch(self, sample_ids: Sequence[int]) -> Tensor:
        """Return int64 [B, T+1]: of each row, the first T are inputs and the last T targets.

        Raises ValueError for a negative id, IntegrityError if the data has changed.
        """
        window_B = windows_of(sample_ids, self.num_samples, self.seed)
        return self._windows([int(window) * self.window_tokens for window in window_B])

    def validation_batch(self, start: int, num_windows: int) -> Tensor:
        """Return int64 [B, T+1]: held-out windows from `start` on, in order. Near the end there are fewer, or none."""
        header = self.tokens.header
        windows = range(start, min(start + num_windows, self.num_validation_windows))
        return self._windows([header.num_train + window * self.window_tokens for window in windows])

    def _windows(self, starts: Sequence[int]) -> Tensor:
        x_BT = np.empty((len(starts), self.window_tokens + 1), np.int64)
        for row, first in enumerate(starts):
            x_BT[row] = self.tokens.read(first, self.window_tokens + 1)
        return torch.from_numpy(x_BT)


def _num_windows(num_tokens: int, window_tokens: int) -> int:
    """Return the number of windows. Neighbours share one token, so that every token but the first is a target once."""
    return max(0, num_tokens - 1) // window_tokens


def windows_of(sample_ids: Sequence[int], num_samples: int, seed: int) -> NDArray[np.int64]:
    """Return [B]: the window of each sample. Raises ValueError for a negative id."""
    id_B = np.asarray(sample_ids, dtype=np.int64)
    if id_B.size and id_B.min() < 0:
        raise ValueError("a sample id cannot be negative")
    epoch_B, place_B = np.divmod(id_B, num_samples)
    window_B = np.empty_like(id_B)
    for epoch in np.unique(epoch_B):
        now_B = epoch_B == epoch
        window_B[now_B] = permute(place_B[now_B], num_samples, seed=seed, epoch=int(epoch))
    return window_B


logger = logging.getLogger(__name__)

_FORM = "2"
"""The version of passages, split and token files. Tokens of other versions are not used."""


def load_bytes(config: DataConfig, *, seed: int, folder: Path | None = None) -> Corpus:
    """Read the standard library, or `folder` in its place, as bytes. Blocks, for about 0.1 s for the standard library.

    One file in VALIDATION_SHARE, chosen by the hash of its path, is held out.

    Raises IntegrityError if the content is not what `config.digest` pins, or changes while it is read, and ConfigError
    if there is too little or too much of it.
    """
    root = folder or standard_library()
    files = read_python(root)
    train = _join(data for name, data in files if not _is_held_out(name))
    validation = _join(data for name, data in files if _is_held_out(name))
    header = TokenHeader(
        vocab_size=BYTE_VOCABULARY, num_train=len(train), num_validation=len(validation), digest=digest_of(files)
    )
    tokens = MemoryTokens(header=header, tokens=np.frombuffer(train + validation, np.uint8))
    remedy = "train with the Python version that the run was made with"
    return Corpus.of(tokens, config, seed=seed, source=f"the text under {root}", remedy=remedy)


def _is_held_out(name: str) -> bool:
    return hashlib.blake2b(os.fsencode(name), digest_size=1).digest()[0] % VALIDATION_SHARE == 0


def _join(documents: Iterable[bytes]) -> bytes:
    return b"".join(data + bytes([END_OF_TEXT]) for data in documents)


def _evict(path: Path, max_bytes: int) -> None:
    """Mark the tokens in `path` as used, and delete the least recently used others beyond `max_bytes` in total.

    Another process may be training on deleted tokens: it has them open, and can still read them.
    """
    try:
        os.utime(path)
        kept = sorted(path.parent.glob("*.tokens"), key=lambda each: each.stat().st_mtime_ns, reverse=True)
        num_bytes = path.stat().st_size
        for other in kept:
            if other != path:
                num_bytes += other.stat().st_size
                if num_bytes > max_bytes:
                    other.unlink()
    except OSError as error:  # another process may be deleting them too
        logger.warning("old tokens in %s could not be deleted: %s", path.parent, error)


def load_corpus(config: DataConfig, *, seed: int, vocab_size: int = 0, local: LocalData = DEFAULT_DATA) -> Corpus:
    """Load the data of a run whose model has `vocab_size` tokens (0: unknown). Fast if its tokens are cached.

    Raises ConfigError for data or a tokenizer that is missing or unusable, IntegrityError for data that is not the
    run's or changes while it is read, and `PreparationStopped` soon after `local.stop` returned True.
    """
    check_meaning(config, local)
    if config.source == "python-stdlib" and config.tokenizer == "bytes":
        corpus = load_bytes(config, seed=seed)
        check_vocabulary(corpus.vocab_size, vocab_size)
        return corpus
    folder = local.cache_folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)  # tokens reveal the text
    except OSError as error:
        raise ConfigError(
            f"tokens cannot be kept in {folder}: {error.strerror}",
            remedy="make it writable, or name another cache folder in XDG_CACHE_HOME",
        ) from error
    tokens, name = _pinned(folder, config), "the run"
    if tokens is None:
        tokenizer = TokenizerFiles.find(config.tokenizer, local.tokenizer, config.tokenizer_revision)
        source = _find_source(config, local)
        path, name = folder / f"{_key(source, tokenizer)}.{config.source}.tokens", source.name
        tokens = _open(path)
        if tokens is None:
            for part in folder.glob("*.part"):
                discard(part.with_suffix(".tokens"))
            tokenize(Job(source=source, tokenizer=tokenizer, path=path, vocab_size=vocab_size), local)
            tokens = TokenFile(path)
    _evict(tokens.path, local.max_cache_bytes)
    check_vocabulary(tokens.header.vocab_size, vocab_size)
    remedy = "get the same data and the same tokenizer as the run's author, under the same file names"
    return Corpus.of(tokens, config, seed=seed, source=name, remedy=remedy)


def check_meaning(config: DataConfig, local: LocalData) -> None:
    """Raises ConfigError if a member names data or a tokenizer that the run does not use."""
    if local.path is not None and config.source != "files":
        what = "the standard library" if config.source == "python-stdlib" else f"the data set {config.hub_id}"
        raise ConfigError(f"the run trains on {what}, so {local.path} is not used", remedy="leave out --data")
    if local.tokenizer is not None and config.tokenizer != "local":
        raise ConfigError(
            f"the run's tokenizer is {config.tokenizer}, so {local.tokenizer} is not used",
            remedy="leave out --tokenizer",
        )


def _find_source(config: DataConfig, local: LocalData) -> DocumentSource:
    if config.source == "python-stdlib":
        return PythonSource.find()
    if config.source == "hub":
        return HubSource.find(config.hub_id, config.hub_config, config.split, config.text_key, config.revision)
    if local.path is None:
        raise ConfigError("the run trains on each member's own files", remedy="name a file or folder: --data PATH")
    return FileSource.find(local.path, config.text_key)


def _key(source: DocumentSource, tokenizer: TokenizerFiles) -> str:
    return hashlib.blake2b(repr((_FORM, source.key, tokenizer.key)).encode(), digest_size=16).hexdigest()


def _pinned(folder: Path, config: DataConfig) -> TokenFile | None:
    """Return the cached tokens that the run pins, if they come from the kind of source that it names. A stranger's run
    on public data must not train on a member's own files, whose digest another run may have revealed."""
    for path in sorted(folder.glob(f"*.{config.source}.tokens")) if config.digest else ():
        try:
            found = read_header(path).digest
        except IntegrityError:
            continue
        if found == config.digest and (tokens := _open(path)) is not None:
            return tokens
    return None


def _open(path: Path) -> TokenFile | None:
    """Return the token file at `path`. None if there is none, or it is damaged."""
    try:
        return TokenFile(path)
    except IntegrityError:
        return None
