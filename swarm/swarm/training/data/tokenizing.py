"""Tokenizes a source's documents into a token file, batch by batch, in a process of its own.

`tokenize` starts the worker process and waits for it. The worker is a new interpreter: a thread would block its node,
and a fork would share the node's locks and sockets. It gets the job through a pipe, and ends when this is closed, as
happens when the parent ends for any reason. It answers with messages in JSON: progress, then the result.

Whether a document is held out depends on the text of its first passage, so that every member splits alike. The first
document is never held out. If no document is, the last tokens are. Blocks. No state.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from swarm_protocol.errors import ConfigError, IntegrityError, SwarmError

from swarm.child_process import how_it_ended, module_path
from swarm.heap import absent
from swarm.training.data.local_data import LocalData, OnProgress, Progress
from swarm.training.data.source import VALIDATION_SHARE, DocumentSource, Passage
from swarm.training.data.token_file import TokenFile, TokenWriter, neighbour
from swarm.training.data.tokenizer import CorpusTokenizer, TokenizerFiles, check_vocabulary

BATCH_CHARACTERS = 1 << 20
"""Characters that are tokenized at once: enough for all threads of a tokenizer."""
REPORT_S = 1.0

LOOK_S = 0.2
"""Interval at which the parent checks whether it should stop the worker."""
_PROGRAM = f"from {__name__} import main; main({{fd}})"
_ERRORS: dict[str, type[SwarmError]] = {each.code: each for each in (ConfigError, IntegrityError)}


def write_tokens(
    source: DocumentSource,
    tokenizer: CorpusTokenizer,
    path: Path,
    on_progress: OnProgress,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Write the tokens of `source` to `path`, completely or not at all. Other processes that need the same file wait
    for it.

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
            remedy="free some space (a token takes one to four bytes), or choose another place",
        ) from error


@contextmanager
def _locked(path: Path, on_progress: OnProgress) -> Iterator[None]:
    """Lock the tokens in `path` against other processes of this machine. Report a wait as progress."""
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
    """Delete the partial files of `path` that a killed worker left, unless another worker is writing them."""
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
    """Reports progress every REPORT_S, and at the end."""

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


def _write(source: DocumentSource, tokenizer: CorpusTokenizer, path: Path, report: _Reports) -> None:
    part = path.with_suffix(".part")
    writer = TokenWriter(part, tokenizer.vocab_size)
    try:
        is_held_out, begins = _Split(), True
        for batch in _batches(source.passages()):
            for passage, tokens in zip(batch, tokenizer.encode([each.text for each in batch]), strict=True):
                start = tokenizer.start_of_text if begins else ()
                end = [] if tokenizer.end_of_text is None or not passage.ends else [tokenizer.end_of_text]
                whole = np.concatenate([np.array(start, np.int64), tokens, np.array(end, np.int64)])
                writer.add(whole, held_out=is_held_out(passage))
                begins = passage.ends
            report(batch[-1].share, writer.num_train + writer.num_validation)
        if not writer.num_validation:
            # there are few documents, or only one: hold out the last tokens
            writer.hold_out(writer.num_train // VALIDATION_SHARE)
        writer.finish()
        part.replace(path)
        report(1.0, writer.num_train + writer.num_validation, at_last=True)
    finally:
        writer.close()
        part.unlink(missing_ok=True)


class _Split:
    """Decides for each passage in turn whether it is held out, by the first passage of its document. The first document
    is never held out."""

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
    """Yield batches of passages, without empty documents."""
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


class PreparationStopped(Exception):
    """The caller stopped the preparation of the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The worker's task: write the tokens of `source` to `path`, for a model with `vocab_size` (0: unknown)."""

    source: DocumentSource
    tokenizer: TokenizerFiles
    path: Path
    vocab_size: int


def tokenize(job: Job, local: LocalData) -> None:
    """Run the job in a worker process. Blocks until the token file exists.

    Raises ConfigError or IntegrityError as the worker did, IntegrityError for a worker that died, and
    PreparationStopped soon after `local.stop` returned True. The worker has ended then.
    """
    ours, theirs = Pipe()
    with ours, tempfile.TemporaryFile() as told:
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module, without a shell
                [sys.executable, "-P", "-c", _PROGRAM.format(fd=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=told,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": module_path()},
                start_new_session=True,  # Ctrl-C goes to the parent, which ends the worker
            )
        try:
            _follow(ours, job, local)
        except (EOFError, ConnectionError):
            raise IntegrityError(
                f"the process that tokenizes {job.source.name} {how_it_ended(process.wait(), told)}",
                remedy="check that there is enough memory and that nothing changes the data, then start again",
            ) from None
        finally:
            process.kill()
            process.wait()
            discard(job.path)


def _follow(pipe: Connection, job: Job, local: LocalData) -> None:
    """Follow the worker until it is done. Raises the error that it reports, and EOFError or ConnectionError if it ends
    without a result."""
    pipe.send(job)
    while not local.stop():
        if not pipe.poll(LOOK_S):
            continue
        match json.loads(pipe.recv_bytes()):
            case {"done": True}:
                return
            case {"error": str(code), "message": str(message), "remedy": str(remedy)}:
                raise _ERRORS[code](message, remedy=remedy)
            case progress:
                local.on_progress(Progress(**progress))
    raise PreparationStopped


def main(fd: int) -> None:
    """Do the job that comes through the pipe `fd`."""
    pipe = Connection(fd)
    job: Job = pipe.recv()
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()

    def answer(**fields: Any) -> None:
        pipe.send_bytes(json.dumps(fields).encode())

    try:
        # without torch, which is not needed, transformers is imported in a third of the time and takes 200 MB less
        with absent("torch"):
            tokenizer = job.tokenizer.load()
        check_vocabulary(tokenizer.vocab_size, job.vocab_size)
        write_tokens(job.source, tokenizer, job.path, lambda progress: answer(**asdict(progress)))
    except (ConfigError, IntegrityError) as error:
        answer(error=error.code, message=error.message, remedy=error.remedy)
    else:
        answer(done=True)


def _end_with_parent(pipe: Connection) -> None:
    with suppress(EOFError, ConnectionError):
        pipe.recv_bytes()
    os._exit(1)
