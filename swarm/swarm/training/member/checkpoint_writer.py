"""Writes a member's checkpoints while it trains: one at a time, in a task that the writer owns.

While one is written, newer states replace each other, and the newest is written next, so the last state is never
skipped. Checkpoints that are kept permanently wait for their turn, unless the disk is too slow for the run. A failed
write is reported once, and again only after a write that succeeded, since a full disk stays full for many outer steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from swarm_protocol.errors import ConfigError, RoundError
from torch import Tensor

from swarm.training.inner.optimizers import NO_MOMENTS
from swarm.training.member.run_member import RunMember
from swarm.training.state.checkpoint import (
    Checkpoint,
    discard_unfinished,
    is_kept,
    load_newest,
    save_checkpoint,
    write_inner,
)
from swarm.training.trainer_events import Admitted, OuterStep, RunResumed, TrainingEvent

logger = logging.getLogger(__name__)

Moments: TypeAlias = Callable[[], Mapping[str, Sequence[Tensor]]]
"""`InnerLoop.state`, or that of another inner loop."""

MAX_WAITING = 3
"""Maximum number of states that wait for the disk. Each takes 8 bytes of memory per parameter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingCheckpoint:
    """A checkpoint to be saved, without the inner optimizer's moments. `inner` gives their file, which `write_inner`
    writes. The writer deletes the file if the checkpoint does not take it."""

    checkpoint: Checkpoint
    inner: Future[Path]

    @property
    def outer_step(self) -> int:
        return self.checkpoint.state.outer_step


class CheckpointWriter:
    """Writes checkpoints. `on_saved` is called after each, `on_failure` at the first of consecutive failures.

    `keep` and `keep_every` are those of `save_checkpoint`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        keep_every: int = 0,
        on_saved: Callable[[int, Path], None] = lambda _step, _path: None,
        on_failure: Callable[[ConfigError], None],
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._keep_every = keep_every
        self._on_saved = on_saved
        self._on_failure = on_failure
        self._is_failing = False
        self._saved = b""
        self._waiting: list[PendingCheckpoint] = []
        self._task: asyncio.Task[None] | None = None

    def resume(self) -> Checkpoint | None:
        """Return the newest checkpoint, or None, after deleting what a killed process left unfinished. Blocks."""
        discard_unfinished(self._folder)
        return load_newest(self._folder)

    def after(self, event: TrainingEvent, member: RunMember, moments: Moments) -> None:
        """Save the member's committed state soon, if `event` changed it or what proves it.

        After a restart, a member must find the state from which it has voted. Consecutive rounds can admit the same
        members, and the state is then saved already. `moments` returns the inner optimizer's, in the thread that
        trains, before the next interval changes them.
        """
        if not isinstance(event, OuterStep | Admitted | RunResumed):
            return
        replica = member.replica
        assert replica is not None
        state, history = replica.current, replica.history.certificates
        # a resume order leaves the state as it is, but its certificate is new
        if state.digest == self._saved and not isinstance(event, RunResumed):
            return
        self._saved = state.digest
        inner = member.between_intervals(lambda: write_inner(self._folder, moments()))
        found = Checkpoint(state=state, inner=NO_MOMENTS, certificate=replica.certificate, history=history)
        self.soon(PendingCheckpoint(checkpoint=found, inner=inner))

    def soon(self, snapshot: PendingCheckpoint) -> None:
        """Save `snapshot`, unless a newer one comes before its turn. Raises an unexpected error of an earlier save."""
        others = [each for each in self._waiting if each.outer_step != snapshot.outer_step]
        kept = [each for each in others if is_kept(each.outer_step, self._keep_every)]
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

    def _give_up(self, snapshot: PendingCheckpoint) -> None:
        _discard(snapshot)
        message = f"the checkpoint of outer step {snapshot.outer_step} was dropped: the disk is slower than the run"
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
                self._on_saved(snapshot.outer_step, path)
            finally:
                _discard(snapshot)

    async def _save(self, snapshot: PendingCheckpoint) -> Path:
        """Write one checkpoint. Raises ConfigError."""
        found = replace(snapshot.checkpoint, inner_file=await _moments(snapshot.inner))
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
