"""Names checkpoints and the states in them. Needs no torch, so that a command can tell at once what a home keeps."""

from __future__ import annotations

import hashlib
from pathlib import Path

MANIFEST = "manifest.bin"


def directory_of(folder: Path, outer_step: int) -> Path:
    """Return the directory of the checkpoint of `outer_step` in the folder of a run's checkpoints."""
    return folder / f"step-{outer_step:013d}"


def digest_at(folder: Path, outer_step: int) -> bytes:
    """Return the digest of the state in the checkpoint of `outer_step`, or b"" if the manifest cannot be read. Does not
    check the state itself."""
    try:
        return hashlib.sha256((directory_of(folder, outer_step) / MANIFEST).read_bytes()).digest()
    except OSError:
        return b""
