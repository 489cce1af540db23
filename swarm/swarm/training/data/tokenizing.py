"""A source's documents as tokens in a file: batch by batch, so memory is bounded whatever the source holds.

Which documents are held out depends on their text alone, so that equal documents are on one side and every member
splits alike. Blocks. No state.
"""

from __future__ import annotations

import errno
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from swarm_protocol.errors import ConfigError, IntegrityError

from swarm.training.data.corpus import VALIDATION_SHARE
from swarm.training.data.local import OnProgress, Progress
from swarm.training.data.passages import Passage, Source
from swarm.training.data.token_file import TokenFile, TokenWriter, neighbour
from swarm.training.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 20
"""Tokenized at once: enough for all threads of a tokenizer."""
REPORT_S = 1.0


def write_tokens(
    source: Source,
    tokenizer: Tokenizer,
    path: Path,
    on_progress: OnProgress,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Leave the tokens of `source` in `path`, whole or not at all. Others that want the same wait, and find them.

    Raises what `source` raises, and ConfigError if the disk does not take the tokens.
    """
    try:
        with _locked(path, on_progress):
            if not is_whole(path):
                _write(source, tokenizer, path, _Reports(on_progress, clock))
    except OSError as error:
        why = "the disk is full" if error.errno == errno.ENOSPC else str(error.strerror or error).lower()
        raise ConfigError(
            f"the tokens of {source.name} cannot be written to {path.parent}: {why}",
            remedy="they take one to four bytes each: free some room, or choose another place",
        ) from error


@contextmanager
def _locked(path: Path, on_progress: OnProgress) -> Iterator[None]:
    """Hold the tokens in `path` alone on this machine. A wait for another process is reported."""
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_progress(Progress(share=0.0, num_tokens=0, tokens_per_s=0.0, waiting=True))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def discard(path: Path) -> None:
    """Remove what a worker that was killed left of `path`, unless another one is at work on it."""
    part = path.with_suffix(".part")
    with suppress(OSError, Timeout), FileLock(path.with_suffix(".lock"), timeout=0):
        for each in (part, neighbour(part)):
            each.unlink(missing_ok=True)


def is_whole(path: Path) -> bool:
    try:
        TokenFile(path)
    except IntegrityError:
        return False
    return True


class _Reports:
    """Tells how far it is every REPORT_S, and at the end."""

    def __init__(self, on_progress: OnProgress, clock: Callable[[], float]) -> None:
        self._on_progress = on_progress
        self._clock = clock
        self._started_s = self._told_s = clock()

    def __call__(self, share: float, num_tokens: int, *, at_last: bool = False) -> None:
        now_s = self._clock()
        if at_last or now_s >= self._told_s + REPORT_S:
            self._told_s = now_s
            rate = num_tokens / max(1e-6, now_s - self._started_s)
            self._on_progress(Progress(share=share, num_tokens=num_tokens, tokens_per_s=rate))


def _write(source: Source, tokenizer: Tokenizer, path: Path, report: _Reports) -> None:
    part = path.with_suffix(".part")
    writer = TokenWriter(part, tokenizer.vocab_size)
    try:
        is_held_out = _Split()
        for batch in _batches(source.passages()):
            for passage, tokens in zip(batch, tokenizer.encode([each.text for each in batch]), strict=True):
                if passage.ends and tokenizer.end_of_text is not None:
                    tokens = np.append(tokens, tokenizer.end_of_text)  # noqa: PLW2901
                writer.add(tokens, held_out=is_held_out(passage))
            report(batch[-1].share, writer.num_train + writer.num_validation)
        if not writer.num_validation:
            # few documents, or a single one: what comes last of it
            writer.hold_out(writer.num_train // VALIDATION_SHARE)
        writer.finish()
        part.replace(path)
        report(1.0, writer.num_train + writer.num_validation, at_last=True)
    finally:
        writer.close()
        part.unlink(missing_ok=True)


class _Split:
    """Whether each passage in turn is held out: as the first one of its document, which is never the first document."""

    def __init__(self) -> None:
        self._is_first = True
        self._continues = False
        self._held_out = False

    def __call__(self, passage: Passage) -> bool:
        if not self._continues:
            chosen = hashlib.blake2b(passage.text.encode(), digest_size=1).digest()[0] % VALIDATION_SHARE == 0
            self._held_out = chosen and not self._is_first
            self._is_first = False
        self._continues = not passage.ends
        return self._held_out


def _batches(passages: Iterator[Passage]) -> Iterator[list[Passage]]:
    """Without documents that have no text."""
    batch: list[Passage] = []
    size = 0
    continues = False
    for passage in passages:
        if passage.text or continues:
            batch.append(passage)
            size += len(passage.text)
        continues = not passage.ends
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
