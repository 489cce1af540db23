"""The chunks of a state that is being fetched, in files.

One file per chunk, named by its digest, so that a killed node continues with the chunks it has. Readers check each
chunk against its digest, so files are neither flushed nor renamed: a chunk damaged by a crash is fetched again. A
failing disk causes a warning, and a restart then begins the fetch anew; the fetch itself goes on. It blocks, and a
folder belongs to one process.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from swarm.training.state.replica_state import CHUNK_BYTES

logger = logging.getLogger(__name__)


class ChunkFolder:
    """Implements `ChunkStore`. It never holds more than `max_bytes`."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._has_failed = False

    def resume(self, digests: Collection[bytes]) -> Iterator[bytes]:
        wanted = {digest.hex() for digest in digests}
        self._num_bytes = 0
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else []:
            try:
                size = path.stat().st_size
                if path.name not in wanted or size > CHUNK_BYTES or self._num_bytes + size > self._max_bytes:
                    path.unlink()
                    continue
                self._num_bytes += size
                yield path.read_bytes()
            except OSError as error:
                self._warn(error)

    def keep(self, digest: bytes, data: bytes) -> None:
        if self._has_failed or self._num_bytes + len(data) > self._max_bytes:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / digest.hex()).write_bytes(data)
        except OSError as error:
            self._warn(error)
        else:
            self._num_bytes += len(data)

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._num_bytes = 0

    def _warn(self, error: OSError) -> None:
        if not self._has_failed:
            logger.warning(
                "after a restart the state must be fetched anew: %s cannot be used (%s)", self._folder, error
            )
        self._has_failed = True
