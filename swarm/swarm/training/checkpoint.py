"""Checkpoints of a replica: written whole or not at all, checked when they are read.

A checkpoint is a folder `step-<outer step>` with the state and the inner optimizer's moments as safetensors, and the state's
manifest. It is written beside its place, flushed to the disk and then renamed, so a crash at any byte, or a full disk,
leaves the former checkpoints as they were. Blocking; the folder belongs to one process.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarm.training.state import Manifest, ReplicaState
from swarm_protocol.errors import ConfigError, IntegrityError, SwarmError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{12})")
_PARTIAL = ".partial"
_MANIFEST, _STATE, _INNER = "manifest.bin", "state.safetensors", "inner.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """`inner` is what `InnerLoop.state` returned."""

    state: ReplicaState
    inner: Mapping[str, Tensor]


def save(folder: Path, checkpoint: Checkpoint, *, keep: int = 2) -> Path:
    """Write `checkpoint`, durable when this returns, and delete all but the newest `keep`.

    Raises ConfigError if the disk is full or cannot be written; the former checkpoints are then untouched.
    """
    place = folder / f"step-{checkpoint.state.outer_step:012d}"
    partial = folder / _PARTIAL
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        state = {"theta": checkpoint.state.theta_N, "momentum": checkpoint.state.momentum_N}
        save_file(state, partial / _STATE)
        save_file(dict(checkpoint.inner), partial / _INNER)
        (partial / _MANIFEST).write_bytes(checkpoint.state.manifest().to_bytes())
        for path in (*partial.iterdir(), partial):
            _flush(path)
        if place.exists():
            shutil.rmtree(place)
        partial.rename(place)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(
            f"no checkpoint could be written to {folder}: {error}", remedy="free some space there"
        ) from error
    for old in _places(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; a broken one is skipped with a warning. None if there is none."""
    for place in _places(folder):
        try:
            return _load(place)
        except SwarmError as error:
            logger.warning("checkpoint %s is skipped: %s", place, error)
    return None


def _places(folder: Path) -> list[Path]:
    """Newest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _load(place: Path) -> Checkpoint:
    try:
        manifest = Manifest.from_bytes((place / _MANIFEST).read_bytes())
        tensors = load_file(place / _STATE)
        inner = load_file(place / _INNER)
        state = ReplicaState(
            outer_step=manifest.outer_step,
            cursor=manifest.cursor,
            group=manifest.group,
            theta_N=tensors["theta"],
            momentum_N=tensors["momentum"],
        )
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise IntegrityError(f"it cannot be read ({error})") from error
    if state.manifest() != manifest:
        raise IntegrityError("it does not match its digest")
    return Checkpoint(state=state, inner=inner)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
