"""Writes a member's promises and votes to disk before others hear of them, so that they outlive a restart.

A member that reports ready for an attempt promises to vote in no earlier one, and says which lock it holds (`quorum`).
Both must outlive the process. The parts of the outcome that it last cast a prepare vote for are kept as well: if all
members stop at once before anyone saw the outcome decided, they can still finish it. The parts are large, so they are
not flushed: a power failure may lose them, the end of the process does not. The page "One history" of the documentation
says what follows from this, and what a run does when the parts are lost.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from swarm_compression.codec import Data
from swarm_protocol.commit_messages import Outcome, Vote
from swarm_protocol.errors import ConfigError, IntegrityError, PeerViolation, reason_of
from swarm_protocol.training_messages import Ready

from swarm.training.allreduce.parts import part_digests
from swarm.training.round.group_members import own_report
from swarm.training.round.round_state import OwnPrepareVote, RoundState, with_coordinator
from swarm.whole_files import joined, split, write_whole

logger = logging.getLogger(__name__)

_NUMBER_BYTES = 8
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A member's newest `report`, and the `first_attempt` of its step (see `round_state.RoundSetup`).
    `own_prepare_vote` is its newest prepare vote, and `parts` are the parts of the outcome of that vote; empty if there
    is no vote or the parts are lost."""

    report: Ready
    first_attempt: int = 0
    own_prepare_vote: OwnPrepareVote | None = None
    parts: tuple[Data, ...] = ()


def promise_of(state: RoundState) -> Promise:
    """Return the promise that binds the member of `state` in later attempts of its step, without the parts."""
    return Promise(
        report=own_report(state), first_attempt=state.setup.first_attempt, own_prepare_vote=state.own_prepare_vote
    )


def bound_by(state: RoundState, promise: Promise | None) -> RoundState:
    """Return `state`, that of a step's beginning, restricted to what an earlier `promise` allows.

    If the run is at the state that the promise names, the member goes on after the attempt it promised, with its lock.
    If the run is at an earlier state, the member abstains: its later votes are no longer known. At another state of the
    same step it also goes on after the attempt it promised. It therefore never signs two different things for one
    attempt, which would convict it (`evidence.equivocation`). A run with a `min_group` of 1 has no history to protect
    in this way.
    """
    setup = state.setup
    if promise is None or setup.succession.min_group == 1:
        return state
    report = promise.report
    if (report.sequence, report.state_digest) != (setup.sequence, setup.state_digest):
        is_lost = (report.sequence, report.step, promise.first_attempt) > (
            setup.sequence,
            setup.step,
            setup.first_attempt,
        )
        is_same_step = (report.sequence, report.step) == (setup.sequence, setup.step) and not is_lost
        attempt = max(setup.first_attempt, report.attempt + 1) if is_same_step else setup.first_attempt
        return with_coordinator(replace(state, attempt=attempt, abstains=is_lost))
    if report.attempt < setup.first_attempt:
        return state  # a later round has committed the same state again since then
    kept = replace(state, lock=report.lock, lock_origin=report.origin, own_prepare_vote=promise.own_prepare_vote)
    return with_coordinator(replace(kept, attempt=report.attempt + 1))


class PromiseFile:
    """Keeps the newest promise of one member in `folder`, which belongs to one run and one process. Blocks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "promise.bin"
        self._written: tuple[object, ...] = ()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process: two processes that sign with one key contradict each other, and the key is
        banned. Raises ConfigError if another process holds the lock, or the folder cannot be locked."""
        descriptor = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released even if the process is killed
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise ConfigError(
                    "another process trains this run with this identity",
                    remedy="give each process an identity of its own",
                ) from None
            raise ConfigError(
                f"{self._folder} cannot be locked: {reason_of(error)}", remedy="make it writable for this user"
            ) from error
        try:
            yield
        finally:
            os.close(descriptor)

    def read(self) -> Promise | None:
        """Return the newest promise, or None if this member has promised nothing yet. Raises IntegrityError if it
        cannot be read: without it this member could vote twice."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._damaged(reason_of(error)) from error
        content = data[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != data[:_DIGEST_BYTES]:
            raise self._damaged("its digest does not match")
        first_attempt = int.from_bytes(content[:_NUMBER_BYTES], "big")
        try:
            report, *voted = split(content[_NUMBER_BYTES:])
            own_vote = OwnPrepareVote(vote=Vote.from_bytes(voted[0]), origin=voted[1]) if voted else None
            promised = Ready.from_bytes(report)
        except (PeerViolation, ValueError, IndexError) as error:  # the digest shows that the file is whole
            raise IntegrityError(
                f"another version of Swarm wrote what this member has voted for, in {self._path}",
                remedy="continue with that version, or join with a new home: a member that forgets its votes could "
                "vote twice",
            ) from error
        parts = self._parts(own_vote.vote.outcome) if own_vote else ()
        return Promise(report=promised, first_attempt=first_attempt, own_prepare_vote=own_vote, parts=parts)

    def has(self, promise: Promise) -> bool:
        """Return whether `write` has stored what `promise` binds this member to."""
        return self._written == _binding(promise)

    def write(self, promise: Promise) -> None:
        """Store `promise` so that it outlives a restart. Raises ConfigError if it cannot be written."""
        own_vote = promise.own_prepare_vote
        voted = own_vote.vote.outcome if own_vote else None
        kept = (promise.report.to_bytes(), *((own_vote.vote.to_bytes(), own_vote.origin) if own_vote else ()))
        content = promise.first_attempt.to_bytes(_NUMBER_BYTES, "big") + b"".join(joined(kept))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if voted is not None and promise.parts and not self._parts_path(voted).exists():
                write_whole(self._parts_path(voted), joined(promise.parts))
            write_whole(self._path, (hashlib.sha256(content).digest(), content), is_flushed=True)
            self._written = _binding(promise)
            self._forget(voted)
        except OSError as error:
            raise ConfigError(
                f"the member's vote cannot be written to {self._folder}: {reason_of(error)}",
                remedy="free space there, or make it writable for this user",
            ) from error

    def _parts_path(self, outcome: Outcome) -> Path:
        return self._folder / f"parts-{outcome.digest().hex()[:32]}.bin"

    def _forget(self, voted: Outcome | None) -> None:
        """Delete the parts of all other outcomes, and those that a killed process wrote half."""
        kept = self._parts_path(voted) if voted is not None else None
        for path in self._folder.glob("*parts-*.bin*"):
            if path != kept:
                with suppress(OSError):
                    path.unlink()

    def _parts(self, voted: Outcome) -> tuple[bytes, ...]:
        """Return the parts of `voted`, or an empty tuple unless all of them are there and have the digests that were
        voted for. A damaged file is deleted, so that the parts are written again once this member has them."""
        path = self._parts_path(voted)
        try:
            parts = tuple(split(path.read_bytes()))
        except OSError:
            return ()
        if part_digests(parts) == voted.part_digests:
            return parts
        with suppress(OSError):
            path.unlink()
        return ()

    def _damaged(self, how: str) -> IntegrityError:
        return IntegrityError(
            f"what this member has voted for cannot be read from {self._path}: {how}",
            remedy="restore that file, or join with a new home: a member that forgets its votes could vote twice",
        )


def _binding(promise: Promise) -> tuple[object, ...]:
    """Return what others may hear of only once it is on disk. The rest of a report binds its member to nothing."""
    report = promise.report
    place = (report.sequence, report.state_digest, report.step, promise.first_attempt, report.attempt)
    return (*place, report.lock, report.origin, promise.own_prepare_vote)
