"""Checkpoints of a replica: written whole or not at all, and checked when they are read.

A checkpoint is a folder `step-<outer step>` with the state, its manifest, the certificate that proves it to others, and
the inner optimizer's moments. It is written beside its place, flushed to the disk, and then renamed: a crash at any
byte, or a full disk, leaves the former checkpoints as they were. Blocks. A folder of checkpoints belongs to one run and
one process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from swarm_protocol.errors import ConfigError, IntegrityError, PeerViolation
from torch import Tensor

from swarm.training.manifest import Manifest
from swarm.training.state import ReplicaState

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-\d{13}")
_PARTIAL = ".partial"
_MANIFEST, _STATE, _INNER, _CERTIFICATE = "manifest.bin", "state.safetensors", "inner.safetensors", "certificate.bin"
_DIGEST = "digest.bin"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """`inner` is what `InnerLoop.state` returned. Whether `certificate` proves `state` is for the trainer to say."""

    state: ReplicaState
    inner: Mapping[str, Tensor]
    certificate: bytes = b""


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int = 2) -> Path:
    """Write `checkpoint`, on the disk when this returns, and delete all but the newest `keep`. Returns its place.

    Nothing is written if the step has a sound checkpoint already. Raises ConfigError if the disk is full or refuses;
    former checkpoints are then untouched.
    """
    if keep < 1:
        raise ValueError("keep at least one checkpoint")
    place = folder / f"step-{checkpoint.state.outer_step:013d}"
    if not _is_sound(place):
        _write(folder, place, checkpoint)
    for old in _places(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; a broken one is skipped with a warning. None: there is none."""
    for place in _places(folder):
        try:
            return _load(place)
        except IntegrityError as error:
            logger.warning("the checkpoint %s is skipped: %s", place, error)
    return None


def _write(folder: Path, place: Path, checkpoint: Checkpoint) -> None:
    partial = folder / _PARTIAL
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            shutil.rmtree(partial)  # of a process that was killed
        partial.mkdir()
        state = checkpoint.state
        save_file({"theta": state.theta_N, "momentum": state.momentum_N}, partial / _STATE)
        save_file(dict(checkpoint.inner), partial / _INNER)
        (partial / _CERTIFICATE).write_bytes(checkpoint.certificate)
        (partial / _DIGEST).write_bytes(_digest((partial / _INNER).read_bytes(), checkpoint.certificate))
        (partial / _MANIFEST).write_bytes(state.manifest().to_bytes())
        for path in (*partial.iterdir(), partial):
            _flush(path)
        if place.exists():
            shutil.rmtree(place)  # it is broken
        partial.rename(place)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"no checkpoint could be written to {folder}: {error}", remedy="free space there") from error


def _places(folder: Path) -> list[Path]:
    """Newest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _is_sound(place: Path) -> bool:
    try:
        _load(place)
    except IntegrityError:
        return False
    return True


def _load(place: Path) -> Checkpoint:
    """Raises IntegrityError unless all is as it was written."""
    try:
        manifest = Manifest.from_bytes((place / _MANIFEST).read_bytes())
        tensors = load((place / _STATE).read_bytes())
        inner, certificate = (place / _INNER).read_bytes(), (place / _CERTIFICATE).read_bytes()
        if _digest(inner, certificate) != (place / _DIGEST).read_bytes():
            raise IntegrityError("the inner optimizer's state or the certificate does not match their digest")
        state = ReplicaState(
            outer_step=manifest.outer_step,
            lanes=manifest.lanes,
            roster=manifest.roster,
            theta_N=tensors["theta"],
            momentum_N=tensors["momentum"],
        )
        checkpoint = Checkpoint(state=state, inner=load(inner), certificate=certificate)
    except (OSError, SafetensorError, PeerViolation, KeyError, ValueError) as error:
        raise IntegrityError(f"it cannot be read ({error})") from error
    if state.manifest() != manifest:
        raise IntegrityError("the state does not match its digest")
    return checkpoint


def _digest(inner: bytes, certificate: bytes) -> bytes:
    """Of what the manifest, which has the state's digest, says nothing about."""
    return hashlib.sha256(hashlib.sha256(inner).digest() + certificate).digest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
