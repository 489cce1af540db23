"""Evidence on a disk: a folder with one file for each peer that it convicts. Blocks.

Each file contains all that a check needs. Files are written completely or not at all; whoever holds the bans decides
which are kept. A file that cannot be read is a warning, since others show the same evidence again. A folder belongs to
one process, and to one run or, if the evidence is about servers, to one network.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, IntegrityError, SwarmError
from swarm_protocol.proof_messages import EvidenceFile
from swarm_protocol.wire import MESSAGE_VERSION

from swarm.whole_files import write_whole

logger = logging.getLogger(__name__)

SUFFIX = ".evidence"


class EvidenceFolder:
    """Keeps evidence in `folder`, for the network `network_id`. `run` is the text of a run's signed file, or empty for
    evidence about servers. At most `max_files` are read. No method raises: a node goes on if its disk fails."""

    def __init__(self, folder: Path, run: str, network_id: str, *, max_files: int = limits.MAX_BANS) -> None:
        self._folder = folder
        self._run = run.encode()
        self._network_id = network_id
        self._max_files = max_files

    def read(self) -> list[bytes]:
        """Return all stored evidence."""
        found = []
        for path in files_in(self._folder, self._max_files):
            try:
                found.append(read_file(path).evidence)
            except SwarmError as error:
                logger.warning("stored evidence is not used: %s", error)
        return found

    def keep(self, peer_id: str, evidence: bytes) -> None:
        """Store the evidence against `peer_id`, replacing earlier evidence against it."""
        file = EvidenceFile(network_id=self._network_id, run=self._run, evidence=evidence)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in self._folder.glob(".*.partial"):  # by a process that was killed
                left.unlink()
            write_whole(self._path_of(peer_id), (file.to_bytes(),), is_flushed=True)
        except OSError as error:
            logger.warning("evidence against %s does not outlive a restart: %s", peer_id, error)

    def forget(self, peer_id: str) -> None:
        """Drop the evidence against `peer_id`, if there is any."""
        with suppress(OSError):
            self._path_of(peer_id).unlink()

    def _path_of(self, peer_id: str) -> Path:
        return self._folder / f"{peer_id}{SUFFIX}"


def files_in(folder: Path, max_files: int = limits.MAX_BANS) -> list[Path]:
    """Return the evidence files in `folder`, at most `max_files`, in the order of their names."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)[:max_files]
    except OSError:
        return []


def read_file(path: Path) -> EvidenceFile:
    """Read an evidence file, and check only its form. Raises ConfigError, or IntegrityError if it is not an evidence
    file."""
    most = EvidenceFile.MAX_BYTES
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {(error.strerror or str(error)).lower()}", remedy="name an evidence file"
        ) from error
    try:
        return EvidenceFile.from_bytes(data)
    except SwarmError as error:
        # the first byte of other files is read as another version of the protocol
        is_other = not data or data[0] != MESSAGE_VERSION
        why = "" if is_other else f": {error.message}"
        raise IntegrityError(
            f"{path} is not an evidence file{why}", remedy="name a file as a home keeps it, or get the file again"
        ) from error


@contextmanager
def proving(path: Path) -> Iterator[None]:
    """Translate a failed check to IntegrityError, which names the file and says that it proves nothing."""
    try:
        yield
    except SwarmError as error:
        raise IntegrityError(f"{path} proves nothing: {error.message}") from error
