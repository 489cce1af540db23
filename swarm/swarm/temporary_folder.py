"""Temporary folders named by their process's id. Creating one removes those of processes that were killed.

The name also has the namespace of the id. Containers that share the folder of temporary files do not see each other's
processes, so a folder is removed only by a process of its own namespace.

A process that ends as it should removes its own. Blocking, and safe from any thread.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

Use = Literal["client", "doctor", "p2pd", "tokenizer", "top", "trainer", "trial", "visit", "warm-up"]
_NAME = re.compile(rf"swarm-(?:{'|'.join(get_args(Use))})-([0-9]{{1,20}})-([0-9]{{1,20}})-\w+", re.ASCII)


def make_folder(use: Use) -> Path:
    """Make a new empty folder that only this user may enter. It is the caller's to remove."""
    _remove_orphans()
    return Path(tempfile.mkdtemp(prefix=f"swarm-{use}-{os.getpid()}-{_namespace()}-"))


@contextmanager
def temporary_folder(use: Use) -> Iterator[Path]:
    """Make a new empty folder, removed with all that is in it when the context is left."""
    folder = make_folder(use)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_orphans() -> None:
    for folder in Path(tempfile.gettempdir()).glob("swarm-*"):
        name = _NAME.fullmatch(folder.name)
        if name and int(name[2]) == _namespace() and not _is_running(int(name[1])):
            shutil.rmtree(folder, ignore_errors=True)  # another user's, or a link, stays


def _namespace() -> int:
    """Return the number of this process's namespace of process ids; 0 on systems without such namespaces."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # another user's process, or no process id
    return True
