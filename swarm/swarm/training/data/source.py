"""Documents as passages of a bounded length, in a fixed order, and the first source of them: the standard library.

A source never depends on more than the names or places of its documents. The standard library's Python files are read
once, wholly, into bounded memory: what happens to the files on the disk afterwards cannot change a sample. A file that
changes or vanishes while it is read is an IntegrityError that names it. No state.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarm_protocol.errors import ConfigError, IntegrityError

PASSAGE_LENGTH = 1 << 16
"""A document is cut at the first end of a line after this many characters, or at twice as many without one."""

VALIDATION_SHARE = 16
"""One document in this many, chosen by hash, is held out."""
MAX_CORPUS_BYTES = 1 << 28
"""The most that is held in memory: enough for small runs, and a bound for a mistyped folder."""
# Packages that distributions leave out, split off or patch, and tests: without them, machines with the same
# Python version more often have the same corpus. Files that start with _sysconfigdata describe one build.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "distutils", "ensurepip"}
    | {"site-packages", "dist-packages", "__pycache__"}
)
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document, the last one if it `ends` it. After it, the share `share` of the source has been read."""

    text: str
    ends: bool
    share: float


class DocumentSource(Protocol):
    """Yields documents in an order that depends only on their names or places."""

    @property
    def name(self) -> str:
        """Return what messages call the source."""

    @property
    def key(self) -> str:
        """A key that changes whenever the content may have changed."""

    def passages(self) -> Iterator[Passage]:
        """Yield all passages. Raises ConfigError for what is no text, IntegrityError if the source changes
        meanwhile."""


def cut(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the passages of a whole document, and whether each is its last."""
    start = 0
    while len(text) - start > 2 * PASSAGE_LENGTH:
        end = text.find("\n", start + PASSAGE_LENGTH, start + 2 * PASSAGE_LENGTH) + 1 or start + 2 * PASSAGE_LENGTH
        yield text[start:end], False
        start = end
    yield text[start:], True


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonSource:
    """The standard library, one file a document. `digest` is that of the files when they were found."""

    digest: str

    @classmethod
    def find(cls) -> PythonSource:
        return cls(digest=digest_of(read_python(standard_library())))

    @property
    def name(self) -> str:
        return f"the text under {standard_library()}"

    @property
    def key(self) -> str:
        return f"python {self.digest}"

    def passages(self) -> Iterator[Passage]:
        files = read_python(standard_library())
        if digest_of(files) != self.digest:
            raise IntegrityError(f"{self.name} changed while it was read", remedy="start again")
        for index, (name, data) in enumerate(files):
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{name} in {standard_library()} is not UTF-8 text", remedy="train with an unchanged Python"
                ) from error
            for piece, ends in cut(text):
                yield Passage(piece, ends, (index + 1) / len(files))


def read_python(root: Path) -> list[tuple[str, bytes]]:
    """Return names and contents of the Python files under `root`, sorted by name. Raises ConfigError,
    IntegrityError."""
    files, total = [], 0
    for name, path in sorted(_find(root)):
        data = _read_whole(path)
        total += len(data)
        if total > MAX_CORPUS_BYTES:
            raise ConfigError(f"under {root} are over {MAX_CORPUS_BYTES} bytes of text", remedy="name a smaller folder")
        files.append((name, data))
    return files


def digest_of(files: list[tuple[str, bytes]]) -> str:
    """Return the digest of names, lengths and contents: names decide the split, lengths the end of each file."""
    digest = hashlib.blake2b(digest_size=32)
    for name, data in files:
        # a name need not be text
        encoded = os.fsencode(name)
        digest.update(len(encoded).to_bytes(8, "little") + encoded + len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _find(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of the Python files. Links are skipped, since they may lead anywhere."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [each for each in subfolders if each not in _SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and not name.startswith(_SKIPPED_FILES) and not path.is_symlink():
                yield path.relative_to(root).as_posix(), path


def _read_whole(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(MAX_CORPUS_BYTES + 1)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}", remedy="restore the file") from error
    if len(data) != size:
        raise IntegrityError(f"{path} changed while it was read", remedy="start again once nothing writes to it")
    return data
