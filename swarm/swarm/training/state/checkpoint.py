"""Checkpoints of a replica: written completely or not at all, and checked when they are read.

A checkpoint is a folder `step-<outer step>` with the state, its manifest, the certificate that proves it to others,
those of the states before it, and the inner optimizer's moments. It is written to another folder, flushed to the disk,
and then renamed: a crash at any byte, or a full disk, does not change the earlier checkpoints. If it replaces another
checkpoint, that one is first renamed.

Tensors are in safetensors files: 8 bytes with the length of the header, the header in JSON, then the tensors' bytes
(https://github.com/huggingface/safetensors). States are written and read piece by piece, so that saving needs no extra
memory, and loading only that of the state. The library's own `save_file` would copy every tensor first.

Blocks. A folder of checkpoints belongs to one run and one process.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from swarm_protocol.errors import ConfigError, IntegrityError, PeerViolation, reason_of
from torch import Tensor

from swarm.training.state.checkpoint_names import MANIFEST, directory_of
from swarm.training.state.replica_state import Assembly, Manifest, ReplicaState
from swarm.whole_files import flush, joined, split

logger = logging.getLogger(__name__)


PIECE_BYTES = 1 << 20

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_NAME = re.compile(r"step-\d{13}")
_PARTIAL = ".partial"
_ASIDE = "."
_INNER_PREFIX = ".moments-"
_DIGEST = "digest.bin"
_FREE = "free space there"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header of a file with these tensors, in their order."""
    entries, start = dict[str, object](), 0
    for name, x in tensors.items():
        stop = start + x.numel() * x.element_size()
        entries[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers expect the tensors at a multiple of eight
    return len(text).to_bytes(8, "little") + text


def pieces(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of the tensors in pieces."""
    for x in tensors:
        view = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def write_file(path: Path, *parts: Iterator[bytes | memoryview]) -> None:
    """Write all of `parts` to a new file and flush it to the disk. Raises OSError."""
    with path.open("xb") as file:
        for part in parts:
            for piece in part:
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())


_STATE, _INNER, _CERTIFICATE = "state.safetensors", "inner.safetensors", "certificate.bin"
_HISTORY = "history.bin"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A state, and what a member needs to continue from it. `inner` is what `InnerLoop.state` returned, each vector in
    one piece. `save_checkpoint` uses `inner_file` from `write_inner` in its place, if given, and moves that file into
    the checkpoint. `RunMember` checks whether `certificate` proves `state`, and what those of `history` prove, which
    convince members that were away meanwhile."""

    state: ReplicaState
    inner: Mapping[str, Tensor]
    certificate: bytes = b""
    history: tuple[bytes, ...] = ()
    inner_file: Path | None = None


def write_inner(folder: Path, inner: Mapping[str, Sequence[Tensor]]) -> Path:
    """Write what `InnerLoop.state` returned to a new file in the folder of checkpoints, without flushing it.

    So the copy of the moments, 8 bytes a parameter, is in the system's file cache, not in this process. Raises
    ConfigError if the file cannot be written.
    """
    whole = {name: torch.empty(sum(map(torch.numel, x)), dtype=x[0].dtype, device="meta") for name, x in inner.items()}
    path = folder / f"{_INNER_PREFIX}{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(header_of(whole))
            for piece in pieces(itertools.chain.from_iterable(inner.values())):
                file.write(piece)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise _unwritten(folder, error) from error
    return path


def discard_unfinished(folder: Path) -> None:
    """Delete what a killed process left unfinished, and restore the checkpoint that it was replacing."""
    if not folder.is_dir():
        return
    for path in folder.glob(f"{_INNER_PREFIX}*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / _PARTIAL, ignore_errors=True)
    for aside in folder.glob(f"{_ASIDE}step-*"):
        place = folder / aside.name.removeprefix(_ASIDE)
        if place.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(place)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int = 2, keep_every: int = 0) -> Path:
    """Write `checkpoint`, flush it to the disk, and return its folder. Delete all other checkpoints but the newest
    `keep` and those of every `keep_every`-th outer step (0: of none).

    Nothing is written if there is already a sound checkpoint of this state and certificate. Raises ConfigError if the
    files cannot be written, or if the state was damaged in memory since it was hashed; earlier checkpoints then do not
    change.
    """
    if keep < 1:
        raise ValueError("keep at least one checkpoint")
    directory = directory_of(folder, checkpoint.state.outer_step)
    if not _is_sound(directory, checkpoint):
        _write(folder, directory, checkpoint)
    # newer ones are damaged, or of a history that the run's author ended with a resume order
    newer = [each for each in _directories(folder) if each > directory]
    older = [each for each in _directories(folder) if each < directory]
    spare = [each for each in older[keep - 1 :] if not is_kept(step_of(each), keep_every)]
    for other in (*newer, *spare):
        shutil.rmtree(other, ignore_errors=True)
    return directory


def is_kept(outer_step: int, keep_every: int) -> bool:
    """Return whether the checkpoint of `outer_step` is kept permanently."""
    return keep_every > 0 and outer_step % keep_every == 0


def steps_in(folder: Path) -> list[int]:
    """Return the outer steps of the folder's checkpoints, damaged ones included, in ascending order."""
    return sorted(map(step_of, _directories(folder)))


def is_checkpoint(directory: Path) -> bool:
    """Return whether `directory` has the name of one checkpoint, and so is not a folder of them."""
    return _NAME.fullmatch(directory.name) is not None


def load_step(folder: Path, outer_step: int) -> Checkpoint:
    """Return the checkpoint of `outer_step`. Raises IntegrityError if it is missing or damaged."""
    return load_at(directory_of(folder, outer_step))


def load_at(directory: Path) -> Checkpoint:
    """Return the checkpoint in the folder `directory`. Raises IntegrityError if it is missing or damaged."""
    try:
        return _load(directory)
    except IntegrityError as error:
        raise IntegrityError(
            f"the checkpoint {directory} is not whole: {error.message}", remedy="choose another"
        ) from error


def load_newest(folder: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, or None. A damaged one is skipped with a warning."""
    for directory in _directories(folder):
        try:
            return _load(directory)
        except IntegrityError as error:
            logger.warning("the checkpoint %s is skipped: %s", directory, error)
    return None


def write_remedy(error: Exception) -> str:
    """Return the remedy for a write that failed with `error`."""
    return "make it writable for this user" if isinstance(error, OSError) and error.errno not in _FULL else _FREE


def _write(folder: Path, directory: Path, checkpoint: Checkpoint) -> None:
    partial, aside = folder / _PARTIAL, folder / f"{_ASIDE}{directory.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            shutil.rmtree(partial)  # of a process that was killed
        partial.mkdir()
        _write_files(partial, checkpoint)
        flush(partial)
        if directory.exists():  # it is damaged, or its state was replaced
            shutil.rmtree(aside, ignore_errors=True)
            directory.rename(aside)
        partial.rename(directory)
        flush(folder)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not directory.exists():  # else the earlier one stays aside: the new one may not survive a power loss
            with suppress(OSError):
                aside.rename(directory)
        raise _unwritten(folder, error) from error
    except ConfigError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _unwritten(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"no checkpoint could be written to {folder}: {reason_of(error)}", remedy=write_remedy(error))


def _write_files(partial: Path, checkpoint: Checkpoint) -> None:
    state = checkpoint.state
    tensors = {"theta": state.theta_N, "momentum": state.momentum_N}  # in the order of the state's chunks
    if state.hashed_again().manifest != state.manifest:
        raise ConfigError(
            f"the state of outer step {state.outer_step} was damaged in this computer's memory, and is not saved",
            remedy="test the memory if this happens again",
        )
    write_file(partial / _STATE, iter([header_of(tensors)]), pieces(tensors.values()))
    if checkpoint.inner_file is not None:
        checkpoint.inner_file.rename(partial / _INNER)
        flush(partial / _INNER)
    else:
        write_file(partial / _INNER, iter([header_of(checkpoint.inner)]), pieces(checkpoint.inner.values()))
    history = b"".join(joined(checkpoint.history))
    write_file(partial / _CERTIFICATE, iter([checkpoint.certificate]))
    write_file(partial / _HISTORY, iter([history]))
    with (partial / _INNER).open("rb") as inner:
        digest = _digest(inner, checkpoint.certificate + history)
    write_file(partial / _DIGEST, iter([digest]))
    write_file(partial / MANIFEST, iter([state.manifest.to_bytes()]))


def _directories(folder: Path) -> list[Path]:
    """Return the folder's checkpoints, newest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def step_of(directory: Path) -> int:
    """Return the outer step that a checkpoint's directory is named after."""
    return int(directory.name.rpartition("-")[2])


def _is_sound(directory: Path, checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint at `directory` is undamaged, and of this state and certificate."""
    try:
        found = _load(directory)
        return (found.certificate, found.state.digest) == (checkpoint.certificate, checkpoint.state.digest)
    except IntegrityError:
        return False


def _load(directory: Path) -> Checkpoint:
    """Read a checkpoint. Raises IntegrityError if any of it is missing or has changed."""
    try:
        certificate = (directory / _CERTIFICATE).read_bytes()
        history_path = directory / _HISTORY
        history = history_path.read_bytes() if history_path.exists() else b""  # earlier versions kept none
        with (directory / _INNER).open("rb") as inner:
            if _digest(inner, certificate + history) != (directory / _DIGEST).read_bytes():
                raise IntegrityError("the inner optimizer's state or a certificate does not match their digest")
        manifest = Manifest.from_bytes((directory / MANIFEST).read_bytes())
        state = _load_state(directory / _STATE, manifest)
        # copies, since memory-mapped tensors would change with the file
        with safe_open(directory / _INNER, framework="pt") as file:
            moments = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, PeerViolation, ValueError) as error:
        raise IntegrityError(f"it cannot be read ({reason_of(error)})") from error
    return Checkpoint(state=state, inner=moments, certificate=certificate, history=tuple(split(history)))


def _load_state(path: Path, manifest: Manifest) -> ReplicaState:
    """Read a state, and check it chunk by chunk. Raises OSError and IntegrityError."""
    if path.stat().st_size < manifest.num_bytes:
        raise IntegrityError("the state is cut off")  # before its memory is allocated
    assembly = Assembly(manifest)
    with path.open("rb") as file:
        header = header_of(dict.fromkeys(("theta", "momentum"), torch.empty(manifest.num_values, device="meta")))
        if file.read(len(header)) != header:
            raise IntegrityError("the state has another header")
        for index in range(len(manifest.chunk_digests)):
            assembly.put(index, file.read(manifest.chunk_size(index)))
        if file.read(1):
            raise IntegrityError("the state goes on after its end")
    return assembly.finish()


def _digest(inner: BinaryIO, certificates: bytes) -> bytes:
    """Return the digest of the files that the manifest does not cover."""
    whole = hashlib.sha256()
    for piece in _read(inner):
        whole.update(piece)
    return hashlib.sha256(whole.digest() + certificates).digest()


def _read(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(PIECE_BYTES), b"")
