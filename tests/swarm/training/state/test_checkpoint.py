"""Tests checkpoints over crashes, corruption and full disks: the newest intact one is always found."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.replica_states import state_of
from swarm.training.state import checkpoint as checkpoint_module
from swarm.training.state.checkpoint import (
    Checkpoint,
    discard_unfinished,
    load_newest,
    load_step,
    save_checkpoint,
    steps_in,
    write_inner,
)
from swarm.training.state.checkpoint_names import digest_at
from swarm.training.state.lease import Cursor, LeaseStripe
from swarm.training.state.replica_state import ReplicaState
from swarm_protocol.errors import ConfigError, IntegrityError
from swarm_protocol.identity import Identity


def _checkpoint(outer_step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(outer_step)
    state = state_of(
        torch.randn(1000, generator=generator),
        torch.randn(1000, generator=generator),
        outer_step=outer_step,
        stripes=(LeaseStripe(cursor=Cursor(next_sample=100 * outer_step, holes=(range(3, 5),) if outer_step else ())),),
        roster=(Identity(bytes(32)).peer_id,),
    )
    inner = {"num_steps": torch.tensor([outer_step]), "exp_avg": torch.ones(3)}
    return Checkpoint(state=state, inner=inner, certificate=b"what proves it", history=(b"first", b"then"))


def _another(outer_step: int) -> Checkpoint:
    """Return a checkpoint of another state of that step."""
    former = _checkpoint(outer_step)
    return replace(former, state=replace(former.state, theta_N=former.state.theta_N + 1).hashed_again())


def _newest_step(folder: Path) -> int:
    found = load_newest(folder)
    assert found is not None
    assert found.state.hashed_again().manifest == _checkpoint(found.state.outer_step).state.manifest
    return found.state.outer_step


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_load_newest_gives_the_saved_checkpoint(tmp_path: Path) -> None:
    saved = _checkpoint(3)
    place = save_checkpoint(tmp_path / "run", saved)
    found = load_newest(tmp_path / "run")
    assert found is not None
    assert found.state.hashed_again().manifest == saved.state.manifest
    assert torch.equal(found.state.theta_N, saved.state.theta_N)
    assert found.inner.keys() == saved.inner.keys()
    assert torch.equal(found.inner["exp_avg"], saved.inner["exp_avg"])
    assert (found.certificate, found.history) == (saved.certificate, saved.history)
    assert place == tmp_path / "run" / "step-0000000000003"
    assert digest_at(tmp_path / "run", 3) == saved.state.digest
    assert digest_at(tmp_path / "run", 4) == b""


def test_load_newest_gives_none_without_a_checkpoint(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "none") is None
    (tmp_path / "step-nonsense").mkdir()
    assert load_newest(tmp_path) is None


def test_save_keeps_the_newest_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 9, 10):
        save_checkpoint(tmp_path, _checkpoint(step), keep=2)
    assert _names(tmp_path) == ["step-0000000000009", "step-0000000000010"]
    assert _newest_step(tmp_path) == 10


def test_save_also_keeps_every_nth_step(tmp_path: Path) -> None:
    for step in range(1, 12):
        save_checkpoint(tmp_path, _checkpoint(step), keep=2, keep_every=4)
    assert steps_in(tmp_path) == [4, 8, 10, 11]
    assert load_step(tmp_path, 4).state.hashed_again().manifest == _checkpoint(4).state.manifest
    with pytest.raises(IntegrityError, match=r"step-0000000000005 is not whole"):
        load_step(tmp_path, 5)


def test_save_of_an_earlier_state_deletes_later_checkpoints(tmp_path: Path) -> None:
    """The run went on from there by its author's order, so that a restart must not find the history that has ended."""
    for step in (8, 9, 7):
        save_checkpoint(tmp_path, _checkpoint(step), keep=2)
    assert _names(tmp_path) == ["step-0000000000007"]


def test_save_replaces_a_checkpoint_of_the_same_state_with_another_certificate(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, replace(_checkpoint(3), certificate=b"votes"))
    save_checkpoint(tmp_path, replace(_checkpoint(3), certificate=b"order"))
    found = load_newest(tmp_path)
    assert found is not None
    assert found.certificate == b"order"


def test_save_refuses_to_keep_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        save_checkpoint(tmp_path, _checkpoint(1), keep=0)


def test_save_writes_nothing_when_the_checkpoint_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, _checkpoint(1))
    monkeypatch.setattr(checkpoint_module, "write_file", None)
    save_checkpoint(tmp_path, _checkpoint(1))


def test_save_replaces_a_broken_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    place = save_checkpoint(tmp_path, _checkpoint(1))
    (place / "manifest.bin").unlink()
    save_checkpoint(tmp_path, _checkpoint(1))
    assert _newest_step(tmp_path) == 1


def _damage(place: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield each file cut at several bytes, with a bit flipped at several bytes, and empty for a missing one."""
    for path in sorted(place.iterdir()):
        data = path.read_bytes()
        for cut in (0, 1, len(data) // 2, len(data) - 1):
            yield path, data[:cut]
        for flip in (0, 9, len(data) // 2, len(data) - 1):
            yield path, data[:flip] + bytes([data[flip] ^ 1]) + data[flip + 1 :]


def test_load_newest_skips_a_damaged_checkpoint_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, _checkpoint(1))
    place = save_checkpoint(tmp_path, _checkpoint(2))
    for path, damaged in list(_damage(place)):
        whole = path.read_bytes()
        path.write_bytes(damaged)
        caplog.clear()
        assert _newest_step(tmp_path) == 1, path
        assert "step-0000000000002 is skipped" in caplog.text
        path.write_bytes(whole)
        assert _newest_step(tmp_path) == 2
    for path in list(place.iterdir()):
        path.rename(tmp_path / "aside")
        assert _newest_step(tmp_path) == 1, path
        (tmp_path / "aside").rename(path)


def test_load_newest_gives_a_checkpoint_of_an_earlier_version_without_a_history(tmp_path: Path) -> None:
    place = save_checkpoint(tmp_path, replace(_checkpoint(1), history=()))
    (place / "history.bin").unlink()
    assert _newest_step(tmp_path) == 1


def test_load_newest_gives_none_when_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    place = save_checkpoint(tmp_path, _checkpoint(1))
    (place / "state.safetensors").write_bytes(b"")
    assert load_newest(tmp_path) is None


def _fail_at(patch: pytest.MonkeyPatch, failing: int, error: BaseException) -> None:
    """Make the operation of that number fail. Six files are written and flushed, then their folder, then its
    parent."""
    steps = iter(range(100))

    def failing_version(real):
        def step(*args):
            if next(steps) == failing:
                raise error
            return real(*args)

        return step

    for owner, name in ((checkpoint_module, "write_file"), (os, "fsync")):
        patch.setattr(owner, name, failing_version(getattr(owner, name)))


def test_save_reports_a_failed_last_flush_and_leaves_both_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, _checkpoint(1))
    with monkeypatch.context() as patch:
        _fail_at(patch, 13, OSError(errno.EIO, os.strerror(errno.EIO)))
        with pytest.raises(ConfigError, match="input/output error"):
            save_checkpoint(tmp_path, _checkpoint(2))
    assert _names(tmp_path) == ["step-0000000000001", "step-0000000000002"]
    assert _newest_step(tmp_path) == 2


def test_save_replaces_another_state_of_the_same_step(tmp_path: Path) -> None:
    """This happens when a run whose histories had diverged is one again."""
    other = _another(1)
    save_checkpoint(tmp_path, _checkpoint(1))
    save_checkpoint(tmp_path, other)
    found = load_newest(tmp_path)
    assert found is not None
    assert torch.equal(found.state.theta_N, other.state.theta_N)


@pytest.mark.parametrize("failing", range(13))
def test_save_leaves_the_former_checkpoint_when_the_disk_is_full_at_any_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    save_checkpoint(tmp_path, _checkpoint(1))
    with monkeypatch.context() as patch:
        _fail_at(patch, failing, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(ConfigError, match=r"no space left on device.*: free space"):
            save_checkpoint(tmp_path, _checkpoint(2))
    assert _names(tmp_path) == ["step-0000000000001"]
    assert _newest_step(tmp_path) == 1
    save_checkpoint(tmp_path, _checkpoint(2))
    assert _newest_step(tmp_path) == 2


@pytest.mark.parametrize("limit_bytes", [100, 3000, 8100])
def test_save_leaves_the_former_checkpoint_when_the_operating_system_refuses_a_write(
    tmp_path: Path, limit_bytes: int
) -> None:
    save_checkpoint(tmp_path, _checkpoint(1))
    # the process's limit of file sizes resembles a full disk and needs no privileges; Python ignores its signal
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with pytest.raises(ConfigError, match=r"file too large.*: free space"):
            save_checkpoint(tmp_path, _checkpoint(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _names(tmp_path) == ["step-0000000000001"]
    assert _newest_step(tmp_path) == 1


def test_save_leaves_the_former_checkpoint_in_place_when_it_cannot_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = _another(1)
    save_checkpoint(tmp_path, _checkpoint(1))
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == ".partial":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(ConfigError, match="input/output error"):
            save_checkpoint(tmp_path, other)
    assert _names(tmp_path) == ["step-0000000000001"]
    assert _newest_step(tmp_path) == 1


def test_save_keeps_the_replaced_checkpoint_aside_when_the_new_one_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, _checkpoint(1))
    with monkeypatch.context() as patch:
        _fail_at(patch, 13, OSError(errno.EIO, os.strerror(errno.EIO)))
        with pytest.raises(ConfigError, match="input/output error"):
            save_checkpoint(tmp_path, _another(1))
    shutil.rmtree(tmp_path / "step-0000000000001")  # as after a power failure
    discard_unfinished(tmp_path)
    assert _newest_step(tmp_path) == 1


class _Killed(BaseException):
    """Stand in for kill -9. No code handles it, so that nothing is cleaned up."""


@pytest.mark.parametrize("phase", range(14))
def test_save_leaves_an_intact_checkpoint_when_it_is_killed_at_any_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    save_checkpoint(tmp_path, _checkpoint(1))
    with monkeypatch.context() as patch:
        _fail_at(patch, phase, _Killed())
        with pytest.raises(_Killed):
            save_checkpoint(tmp_path, _checkpoint(2))
    assert _newest_step(tmp_path) == (2 if phase == 13 else 1)
    save_checkpoint(tmp_path, _checkpoint(3))
    assert _newest_step(tmp_path) == 3
    assert ".partial" not in _names(tmp_path)


def test_loaded_checkpoint_does_not_depend_on_its_files(tmp_path: Path) -> None:
    place = save_checkpoint(tmp_path, _checkpoint(1))
    found = load_newest(tmp_path)
    assert found is not None
    for path in place.iterdir():
        path.write_bytes(b"")
    assert found.state.hashed_again().manifest == _checkpoint(1).state.manifest
    assert found.inner["exp_avg"].tolist() == [1.0, 1.0, 1.0]


def test_saved_file_can_be_read_by_the_safetensors_library(tmp_path: Path) -> None:
    saved = _checkpoint(1)
    place = save_checkpoint(tmp_path, saved)
    read = load_file(place / "state.safetensors")
    assert torch.equal(read["theta"], saved.state.theta_N)
    assert torch.equal(read["momentum"], saved.state.momentum_N)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.bool])
def test_save_keeps_inner_tensors_of_any_kind(tmp_path: Path, dtype: torch.dtype) -> None:
    inner = {"matrix": torch.arange(6).reshape(2, 3).to(dtype).T, "empty": torch.zeros(0, dtype=dtype)}
    save_checkpoint(tmp_path, replace(_checkpoint(1), inner=inner))
    found = load_newest(tmp_path)
    assert found is not None
    for name, x in inner.items():
        assert found.inner[name].dtype == dtype
        assert torch.equal(found.inner[name], x)


def test_save_takes_the_file_of_moments_into_the_checkpoint(tmp_path: Path) -> None:
    written = write_inner(tmp_path, {"num_steps": [torch.tensor([3])], "exp_avg": [torch.ones(2), torch.zeros(3)]})
    save_checkpoint(tmp_path, replace(_checkpoint(1), inner={}, inner_file=written))
    found = load_newest(tmp_path)
    assert found is not None
    assert {name: x.tolist() for name, x in found.inner.items()} == {"num_steps": [3], "exp_avg": [1, 1, 0, 0, 0]}
    assert _names(tmp_path) == ["step-0000000000001"]


def test_discard_unfinished_deletes_files_of_a_killed_process_but_no_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, _checkpoint(1))
    write_inner(tmp_path, {"exp_avg": [torch.ones(2)]})
    (tmp_path / ".partial").mkdir()
    discard_unfinished(tmp_path)
    assert _names(tmp_path) == ["step-0000000000001"]
    discard_unfinished(tmp_path / "no folder yet")


@pytest.mark.parametrize("num_done", range(4))
def test_save_leaves_one_of_two_checkpoints_when_it_is_killed_while_replacing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
    """A run may have no other checkpoint: each admission before its first outer step replaces that of step 0."""
    former, later = (replace(_checkpoint(0), certificate=name) for name in (b"former", b"later"))
    save_checkpoint(tmp_path, former)
    changes = iter(range(100))

    def until_killed(real):
        def change(*args, **options):
            if next(changes) == num_done:
                raise _Killed
            return real(*args, **options)

        return change

    with monkeypatch.context() as patch:
        for owner, name in ((Path, "rename"), (shutil, "rmtree")):
            patch.setattr(owner, name, until_killed(getattr(owner, name)))
        with pytest.raises(_Killed):
            save_checkpoint(tmp_path, later)
    discard_unfinished(tmp_path)
    found = load_newest(tmp_path)
    assert found is not None
    assert found.certificate == (b"later" if num_done == 3 else b"former")
    save_checkpoint(tmp_path, later)
    assert _names(tmp_path) == ["step-0000000000000"]


def test_write_inner_leaves_no_file_when_the_disk_is_full(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ConfigError, match=r"no checkpoint could be written .*file too large"):
            write_inner(tmp_path, {"exp_avg": [torch.ones(10_000)]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _names(tmp_path) == []


def test_save_needs_no_memory_for_a_second_copy(tmp_path: Path) -> None:
    """40 MB of state and moments are read and written in pieces. Tensors themselves are not traced."""
    state = ReplicaState.initial(torch.randn(2_500_000))
    tracemalloc.start()
    try:
        save_checkpoint(tmp_path, Checkpoint(state=state, inner={"exp_avg": torch.ones(5_000_000)}))
        found = load_newest(tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None
    assert torch.equal(found.state.theta_N, state.theta_N)
    assert peak_bytes < 6 << 20


def test_save_refuses_a_state_that_was_damaged_in_memory(tmp_path: Path) -> None:
    sound = _checkpoint(2)
    save_checkpoint(tmp_path, _checkpoint(1))
    sound.state.theta_N[7] += 1
    with pytest.raises(ConfigError, match="damaged in this computer's memory"):
        save_checkpoint(tmp_path, sound)
    assert _names(tmp_path) == ["step-0000000000001"]
    save_checkpoint(tmp_path, _checkpoint(2))
    assert _newest_step(tmp_path) == 2


def test_save_that_keeps_one_checkpoint_keeps_the_intact_one_beside_a_newer_broken_one(tmp_path: Path) -> None:
    place = save_checkpoint(tmp_path, _checkpoint(9))
    (place / "manifest.bin").write_bytes(b"")
    save_checkpoint(tmp_path, _checkpoint(8), keep=1)
    assert _newest_step(tmp_path) == 8


def test_save_reports_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, _checkpoint(1))
    with monkeypatch.context() as patch:
        _fail_at(patch, 0, OSError(errno.EROFS, os.strerror(errno.EROFS)))
        with pytest.raises(ConfigError, match=r"read-only file system.*: make it writable"):
            save_checkpoint(tmp_path, _checkpoint(2))
    assert _newest_step(tmp_path) == 1


def test_load_newest_gives_the_former_checkpoint_when_the_state_is_cut_at_any_byte(tmp_path: Path) -> None:
    """It is cut to every length around the header's end, the tensors' border, and the file's end."""
    save_checkpoint(tmp_path, _checkpoint(1))
    path = save_checkpoint(tmp_path, _checkpoint(2)) / "state.safetensors"
    whole = path.read_bytes()
    start = len(whole) - 8000
    for cut in (
        *range(20),
        *range(start - 4, start + 4),
        start + 3999,
        start + 4000,
        *range(len(whole) - 9, len(whole)),
    ):
        path.write_bytes(whole[:cut])
        assert _newest_step(tmp_path) == 1, cut
    path.write_bytes(whole + b"x")
    assert _newest_step(tmp_path) == 1


_WRITER = """
import itertools, os, signal, sys
from dataclasses import replace
from pathlib import Path
import torch
torch.set_num_threads(1)
os.fsync = lambda _: None  # SIGKILL loses nothing that was written, flushed or not
from swarm.training.state.checkpoint import Checkpoint, load_newest, save_checkpoint
from swarm.training.state.replica_state import ReplicaState

def checkpoint(step):
    theta_N = torch.full((3000,), float(step))
    state = ReplicaState.initial(theta_N)
    state = replace(state, manifest=replace(state.manifest, outer_step=step))
    return Checkpoint(state=state, inner={"exp_avg": theta_N}, certificate=b"%d" % step)

def kill_before_call(count):
    calls = itertools.count()
    def hook(event, _):
        if event == "open" or event.startswith("os."):
            if next(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

folder, newest, is_killed, num_calls = Path(sys.argv[1]), 1, True, 0
save_checkpoint(folder, checkpoint(newest))
while is_killed:
    child = os.fork()
    if not child:
        kill_before_call(num_calls)
        save_checkpoint(folder, checkpoint(newest + 1))
        os._exit(0)
    is_killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    num_calls += is_killed
    found = load_newest(folder)
    step = found.state.outer_step
    assert step in (newest, newest + 1) and (is_killed or step > newest), (step, newest, num_calls)
    assert found.state.hashed_again().manifest == checkpoint(step).state.manifest
    assert found.certificate == b"%d" % step and torch.equal(found.inner["exp_avg"], found.state.theta_N)
    newest = step
save_checkpoint(folder, checkpoint(newest + 1))
print(num_calls, newest, sorted(path.name for path in folder.iterdir()))
"""


def test_process_killed_before_any_of_its_system_calls_leaves_a_committed_state(tmp_path: Path) -> None:
    """It is killed by SIGKILL before its first call on files, then before its second one, and so on. Other tests cut
    files."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WRITER, str(tmp_path)],
        check=False,
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    num_calls, newest = map(int, found.stdout.split()[:2])
    assert num_calls > 20
    assert newest > 2, "no process was killed after it had written everything"
    assert ".partial" not in found.stdout
    assert len(_names(tmp_path)) == 2
