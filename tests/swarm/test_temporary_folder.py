"""Temporary folders: what a killed process leaves behind is removed by the next one, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import pytest
from swarm.temporary_folder import Use, make_folder, temporary_folder

KILLED = """
import os, signal
from swarm.temporary_folder import make_folder
for use in {uses}:
    (make_folder(use) / "identity").write_text("a key")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_folders_of_a_killed_process_are_removed_by_the_next(place: Path) -> None:
    program = KILLED.format(uses=get_args(Use))
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert len(list(place.iterdir())) == len(get_args(Use))
    folder = make_folder("client")
    assert list(place.iterdir()) == [folder]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_folders_of_running_processes_and_of_others_stay(place: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here = make_folder("client").name.split("-")[3]
    others = {
        f"swarm-client-{dead.pid}-{here}",
        f"swarm-notes-{dead.pid}-{here}-x",
        f"swarm-client-{'9' * 30}-{here}-x",
        f"swarm-client--{here}-x",
        f"swarm-client-{dead.pid}-{int(here) + 1}-container",
    }
    for name in others:
        (place / name).mkdir()
    target = place / "kept"
    target.mkdir()
    (place / f"swarm-client-{dead.pid}-{here}-link").symlink_to(target)
    gone = place / f"swarm-client-{dead.pid}-{here}-gone"
    gone.mkdir()
    ours = make_folder("tokenizer")
    make_folder("p2pd")
    assert ours.exists()
    assert target.exists()
    assert not gone.exists()
    assert others <= {each.name for each in place.iterdir()}


def test_folder_is_removed_with_its_context(place: Path) -> None:
    with pytest.raises(ValueError, match="x"), temporary_folder("visit") as folder:  # noqa: PT012 - what is left matters
        (folder / "file").write_text("x")
        raise ValueError("x")
    assert list(place.iterdir()) == []
