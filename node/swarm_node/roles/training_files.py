"""The files of a node that trains: checkpoints of the run, and chunks of a state that is being fetched.

`CheckpointWriter` writes one checkpoint at a time. While it writes, newer states replace each other, and the newest is
written next, so the last state is never skipped. Checkpoints that are kept permanently wait for their turn, unless the
disk is too slow for the run. A failed write is reported once, and again only after a write that succeeded, since a full
disk stays full for many outer steps. It owns one task.

`ChunkFolder` keeps one file per chunk, named by its digest, so that a killed node continues with the chunks it has.
Readers check each chunk against its digest, so files are neither flushed nor renamed: a chunk damaged by a crash is
fetched again. A failing disk causes a warning, and a restart then begins the fetch anew; the fetch itself goes on. It
blocks, and belongs to one process.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from swarm.training.inner.optimizers import NO_MOMENTS
from swarm.training.state.checkpoint import Checkpoint, is_kept, save_checkpoint
from swarm.training.state.replica_state import CHUNK_BYTES, ReplicaState
from swarm_protocol.errors import ConfigError, RoundError

logger = logging.getLogger(__name__)

MAX_WAITING = 3
"""Maximum number of states that wait for the disk. Each takes 8 bytes of memory per parameter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingCheckpoint:
    """A committed state to be saved.

    `inner` gives the file of the inner optimizer's moments that `write_inner` writes. The writer deletes the file if no
    checkpoint takes it.
    """

    state: ReplicaState
    certificate: bytes
    inner: Future[Path]


class CheckpointWriter:
    """Writes checkpoints. `on_saved` is called after each, `on_failure` at the first of consecutive failures."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_every: int = 0,
        on_saved: Callable[[int, Path], None],
        on_failure: Callable[[ConfigError], None],
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._keep_every = keep_every
        self._on_saved = on_saved
        self._on_failure = on_failure
        self._is_failing = False
        self._waiting: list[PendingCheckpoint] = []
        self._task: asyncio.Task[None] | None = None

    def soon(self, snapshot: PendingCheckpoint) -> None:
        """Save `snapshot`, unless a newer one comes before its turn. Raises an unexpected error of an earlier save."""
        kept = [each for each in self._waiting if self._outlives(each, snapshot)]
        for each in self._waiting:
            if each not in kept:
                _discard(each)
        self._waiting = [*kept, snapshot]
        if len(self._waiting) > MAX_WAITING:
            self._give_up(self._waiting.pop(0))
        if self._task is not None and self._task.done():
            self._task.result()
            self._task = None
        if self._task is None:
            self._task = asyncio.create_task(self._save_all(), name="save")

    async def finish(self) -> None:
        """Wait until the newest snapshot is saved."""
        if self._task is not None:
            await self._task

    def _outlives(self, waiting: PendingCheckpoint, newer: PendingCheckpoint) -> bool:
        step = waiting.state.outer_step
        return is_kept(step, self._keep_every) and step != newer.state.outer_step

    def _give_up(self, snapshot: PendingCheckpoint) -> None:
        _discard(snapshot)
        message = (
            f"the checkpoint of outer step {snapshot.state.outer_step} was dropped: the disk is slower than the run"
        )
        self._on_failure(ConfigError(message, remedy="keep fewer checkpoints with --keep-every"))

    async def _save_all(self) -> None:
        while self._waiting:
            snapshot = self._waiting.pop(0)
            try:
                path = await self._save(snapshot)
            except ConfigError as error:
                if not self._is_failing:
                    self._on_failure(error)
                self._is_failing = True
            else:
                self._is_failing = False
                self._on_saved(snapshot.state.outer_step, path)
            finally:
                _discard(snapshot)

    async def _save(self, snapshot: PendingCheckpoint) -> Path:
        """Write one checkpoint. Raises ConfigError."""
        found = Checkpoint(
            state=snapshot.state,
            inner=NO_MOMENTS,
            inner_file=await _moments(snapshot.inner),
            certificate=snapshot.certificate,
        )
        return await asyncio.to_thread(
            save_checkpoint, self._folder, found, keep=self._keep, keep_every=self._keep_every
        )


async def _moments(inner: Future[Path]) -> Path | None:
    """Return the moments' file, or None if the worker processes have ended. A checkpoint without moments is still
    useful."""
    try:
        return await asyncio.wrap_future(inner)
    except RoundError as error:
        logger.warning("a checkpoint is written without the inner optimizer's moments: %s", error)
        return None


def _discard(snapshot: PendingCheckpoint) -> None:
    """Delete the moments' file once it is written, unless it has become part of a checkpoint."""

    def delete(inner: Future[Path]) -> None:
        if not inner.cancelled() and inner.exception() is None:
            inner.result().unlink(missing_ok=True)

    if not snapshot.inner.cancel():
        snapshot.inner.add_done_callback(delete)


class ChunkFolder:
    """Implements `ChunkStore`. It never holds more than `max_bytes`."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._has_failed = False

    def resume(self, digests: Collection[bytes]) -> Iterator[bytes]:
        wanted = {digest.hex() for digest in digests}
        self._num_bytes = 0
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else []:
            try:
                size = path.stat().st_size
                if path.name not in wanted or size > CHUNK_BYTES or self._num_bytes + size > self._max_bytes:
                    path.unlink()
                    continue
                self._num_bytes += size
                yield path.read_bytes()
            except OSError as error:
                self._warn(error)

    def keep(self, digest: bytes, data: bytes) -> None:
        if self._has_failed or self._num_bytes + len(data) > self._max_bytes:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / digest.hex()).write_bytes(data)
        except OSError as error:
            self._warn(error)
        else:
            self._num_bytes += len(data)

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._num_bytes = 0

    def _warn(self, error: OSError) -> None:
        if not self._has_failed:
            logger.warning(
                "after a restart the state must be fetched anew: %s cannot be used (%s)", self._folder, error
            )
        self._has_failed = True
