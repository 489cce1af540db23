"""Documents as passages of bounded length, in a fixed order, and the default source: the standard library.

The order of a source's documents depends only on their names or places. The standard library's Python files are read
once, completely, into bounded memory, so that later changes on the disk cannot change a sample. A file that changes or
vanishes while it is read is an IntegrityError that names it. No state.
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
"""A document is cut at the first line end after this many characters, or after twice as many if there is none."""

VALIDATION_SHARE = 16
"""One document in this many, chosen by hash, is held out."""
MAX_CORPUS_BYTES = 1 << 28
"""Maximum bytes held in memory: enough for small runs, and a limit for a wrong folder."""
# Tests, and packages that distributions leave out, split off or patch: without them, machines with the same Python
# version have the same corpus more often. Files that start with _sysconfigdata describe one build.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "distutils", "ensurepip"}
    | {"site-packages", "dist-packages", "__pycache__"}
)
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document. `ends`: it is the last one. `share`: how much of the source has been read after it, 0 to
    1."""

    text: str
    ends: bool
    share: float


class DocumentSource(Protocol):
    """Yields documents in an order that depends only on their names or places."""

    @property
    def name(self) -> str:
        """The name of the source in messages."""

    @property
    def key(self) -> str:
        """A key that changes whenever the content may have changed."""

    def passages(self) -> Iterator[Passage]:
        """Yield all passages. Raises ConfigError for content that is not text, IntegrityError if the source changes."""


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
    """The standard library, one document per file. `digest` is that of the files when they were found."""

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
            raise ConfigError(f"{root} has over {MAX_CORPUS_BYTES} bytes of text", remedy="name a smaller folder")
        files.append((name, data))
    return files


def digest_of(files: list[tuple[str, bytes]]) -> str:
    """Return the digest of names, lengths and contents: names determine the split, lengths the end of each file."""
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
