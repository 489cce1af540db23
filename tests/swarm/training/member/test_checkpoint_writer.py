"""Checkpoints are saved in the background, the newest state last."""

from __future__ import annotations

import asyncio
import shutil
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.replica_states import state_of
from support.training_swarm import SyntheticInner
from swarm.training.inner.interval import Intervals
from swarm.training.inner.optimizers import NO_MOMENTS, InnerOptimizer
from swarm.training.member import checkpoint_writer
from swarm.training.member.checkpoint_writer import CheckpointWriter, PendingCheckpoint
from swarm.training.run.run_tables import InnerConfig
from swarm.training.state.checkpoint import Checkpoint, load_newest, steps_in, write_inner
from swarm_protocol.errors import ConfigError, RoundError


def snapshot(folder: Path, step: int) -> PendingCheckpoint:
    inner: Future[Path] = Future()
    inner.set_result(write_inner(folder, {"num_steps": [torch.tensor([step])]}))
    state = state_of(torch.full((10,), float(step)), outer_step=step)
    found = Checkpoint(state=state, inner=NO_MOMENTS, certificate=b"c%d" % step, history=(b"first",))
    return PendingCheckpoint(checkpoint=found, inner=inner)


def make_saving(folder: Path, saved: list[int], failed: list[ConfigError]) -> CheckpointWriter:
    return CheckpointWriter(folder, keep=2, on_saved=lambda step, path: saved.append(step), on_failure=failed.append)


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Return what tells that a write has begun, and what lets writes end."""
    begun, go, write = threading.Event(), threading.Event(), checkpoint_writer.save_checkpoint

    def slow(folder: Path, checkpoint: Checkpoint, *, keep: int, keep_every: int) -> Path:
        begun.set()
        assert go.wait(20)
        return write(folder, checkpoint, keep=keep, keep_every=keep_every)

    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", slow)
    return begun, go


def test_soon_skips_to_the_newest_state_while_one_is_written_and_always_saves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = slow_disk(monkeypatch)

    async def main() -> list[int]:
        saved: list[int] = []
        keeper = make_saving(tmp_path, saved, [])
        keeper.soon(snapshot(tmp_path, 1))
        assert await asyncio.to_thread(begun.wait, 20)
        for step in (2, 3, 4):
            keeper.soon(snapshot(tmp_path, step))
        go.set()
        await keeper.finish()
        return saved

    assert asyncio.run(main()) == [1, 4]
    newest = load_newest(tmp_path)
    assert newest is not None
    assert (newest.state.outer_step, newest.certificate, newest.inner["num_steps"].item()) == (4, b"c4", 4)
    assert not list(tmp_path.glob(".moments-*"))


def test_soon_keeps_permanent_checkpoints_until_their_turn_and_reports_those_skipped_by_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = slow_disk(monkeypatch)

    async def main() -> tuple[list[int], list[str]]:
        saved: list[int] = []
        failed: list[ConfigError] = []
        on_saved = lambda step, _path: saved.append(step)  # noqa: E731
        keeper = CheckpointWriter(tmp_path, keep=1, keep_every=3, on_saved=on_saved, on_failure=failed.append)
        keeper.soon(snapshot(tmp_path, 1))
        assert await asyncio.to_thread(begun.wait, 20)
        for step in range(2, 12):
            keeper.soon(snapshot(tmp_path, step))
        go.set()
        await keeper.finish()
        return saved, [error.message for error in failed]

    saved, failed = asyncio.run(main())
    assert saved == [1, 6, 9, 11]
    assert failed == ["the checkpoint of outer step 3 was dropped: the disk is slower than the run"]
    assert steps_in(tmp_path) == [6, 9, 11]
    assert not list(tmp_path.glob(".moments-*"))


def test_soon_saves_the_next_state_after_a_failed_write(tmp_path: Path) -> None:
    async def main() -> None:
        saved: list[int] = []
        failed: list[ConfigError] = []
        folder = tmp_path / "checkpoints"
        folder.write_text("in the way")
        keeper = make_saving(folder, saved, failed)
        keeper.soon(snapshot(tmp_path, 1))
        await keeper.finish()
        folder.unlink()
        keeper.soon(snapshot(tmp_path, 2))
        await keeper.finish()
        assert (saved, len(failed)) == ([2], 1)
        assert not list(tmp_path.glob(".moments-*"))

    asyncio.run(main())


def test_soon_warns_once_of_a_full_disk_and_again_after_it_was_freed(tmp_path: Path) -> None:
    async def main() -> None:
        saved: list[int] = []
        failed: list[ConfigError] = []
        folder = tmp_path / "checkpoints"
        keeper = make_saving(folder, saved, failed)
        for step in range(1, 10):
            if step in {1, 6}:
                shutil.rmtree(folder, ignore_errors=True)
                folder.write_text("in the way")
            if step == 5:
                folder.unlink()
            keeper.soon(snapshot(tmp_path, step))
            await keeper.finish()
        assert (saved, len(failed)) == ([5], 2)
        assert "no checkpoint could be written" in failed[0].message

    asyncio.run(main())


def test_soon_without_moments_saves_the_state_and_those_of_no_step(tmp_path: Path) -> None:
    """The replica's worker processes have just ended."""

    async def main() -> None:
        saved: list[int] = []
        keeper = make_saving(tmp_path, saved, [])
        inner: Future[Path] = Future()
        inner.set_exception(RoundError("the worker processes have ended"))
        for step in (1, 2):
            keeper.soon(replace(snapshot(tmp_path, step), inner=inner))
            await keeper.finish()
        assert saved == [1, 2]

    asyncio.run(main())
    newest = load_newest(tmp_path)
    assert newest is not None
    layer = torch.nn.Linear(2, 2)
    optimizer = InnerOptimizer(InnerConfig(), dict(layer.named_parameters()))
    optimizer.load_state(newest.inner)
    assert optimizer.state().keys() == {"num_steps"}


def test_work_submitted_between_intervals_comes_before_the_interval_that_is_asked_for_next() -> None:
    """It runs in the thread that trains, so that copying moments neither delays the loop nor sees them change."""
    inner, seen = SyntheticInner(), list[tuple[int, bool]]()

    def copy() -> None:
        seen.append((len(inner.trained), threading.current_thread() is threading.main_thread()))

    async def main() -> None:
        intervals = Intervals(inner)
        await intervals.begin().train(range(4), 2)
        copied = intervals.submit(copy)
        await intervals.begin().train(range(4), 2)
        assert copied.done()
        intervals.close()

    asyncio.run(main())
    assert seen == [(1, False)]
