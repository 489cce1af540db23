"""Checkpoints of runs that this machine offers for download: a directory whose subdirectories are named by run id.

As in a node's home, `RUN/RUN/` holds the exported model; without it, the files are in `RUN/` itself. Only plain files
that the server lists itself are offered: a requested name is looked up among them and never joined to a path. Blocks.
Keeps no state.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from swarm_node.dashboard.views import CheckpointFile
from swarm_node.formatting import shown

MAX_FILES = 256
"""Maximum number of files of one run: a model's shards and its small files."""


def checkpoint_files(folder: Path | None, run: str) -> tuple[CheckpointFile, ...]:
    """Return the run's files by name. Empty if there are none, or none that can be read."""
    return tuple(
        CheckpointFile(
            name=shown(path.name),
            num_bytes=num_bytes,
            url=f"/api/v1/checkpoints/{quote(run, safe='')}/{quote(path.name, safe='')}",
        )
        for path, num_bytes in _files_of(folder, run)
    )


def find_file(folder: Path | None, run: str, name: str) -> Path | None:
    """Return the run's file of that name, or None."""
    return next((path for path, _ in _files_of(folder, run) if path.name == name), None)


def _files_of(folder: Path | None, run: str) -> list[tuple[Path, int]]:
    of_run = _subfolder(folder, run) if folder is not None else None
    return _plain_files(_subfolder(of_run, run) or of_run) if of_run is not None else []


def _subfolder(folder: Path, name: str) -> Path | None:
    """Return the directory of that name in `folder`, or None. Symbolic links are not followed."""
    try:
        with os.scandir(folder) as entries:
            return next(
                (Path(entry.path) for entry in entries if entry.name == name and entry.is_dir(follow_symlinks=False)),
                None,
            )
    except OSError:
        return None


def _plain_files(folder: Path) -> list[tuple[Path, int]]:
    try:
        with os.scandir(folder) as entries:
            found = [
                (Path(entry.path), entry.stat(follow_symlinks=False).st_size)
                for entry in entries
                if entry.is_file(follow_symlinks=False) and not entry.name.startswith(".") and entry.name.isprintable()
            ]
    except OSError:
        return []
    return sorted(found)[:MAX_FILES]
