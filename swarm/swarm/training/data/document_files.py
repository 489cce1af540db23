"""A member's own files as documents: text, JSON lines, parquet and arrow, in the order of their names.

A text file is one document; a line of JSON, or a row of a table, is one too. Hidden files and links are skipped, and
whatever is not of a known kind is UTF-8 text, or refused. Memory is bounded by a passage, a line, or what parquet calls
a row group. A file that changes, shrinks or vanishes between the look at all of them and its last byte is an
IntegrityError that names it. Blocks. No state.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from swarm_protocol.errors import ConfigError, IntegrityError, SwarmError

from swarm.training.data.passages import PASSAGE_LENGTH, Passage, cut
from swarm.training.data.text_columns import read_arrow, read_parquet

MAX_LINE_BYTES = 1 << 26
"""Of a line of JSON: it is held in memory."""

Pieces = Iterator[tuple[str, bool, float]]
"""Of one file: texts, whether each ends its document, and the share of the file that is read with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file as it was found. `name` is below the folder that was named."""

    name: str
    path: Path
    size: int
    changed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """Implements `passages.Source`. `text_key` is the column or key that holds the text."""

    root: Path
    files: tuple[File, ...]
    text_key: str

    @classmethod
    def find(cls, root: Path, text_key: str) -> FileSource:
        """Look at a file, or at all of a folder. Raises ConfigError if there is nothing to read."""
        try:
            files = tuple(sorted(_find(root), key=lambda file: file.name))
        except OSError as error:
            raise ConfigError(
                f"{error.filename or root} cannot be read: {error.strerror}", remedy="name a file or folder that can be"
            ) from error
        if not any(file.size for file in files):
            raise ConfigError(f"there is no text in {root}", remedy="name a file, or a folder with files")
        return cls(root=root, files=files, text_key=text_key)

    @property
    def name(self) -> str:
        return str(self.root)

    @property
    def key(self) -> str:
        """Of names, sizes and times of change: to read all of it on each start would take minutes."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            digest.update(repr((os.fsencode(file.name), file.size, file.changed_ns)).encode())
        return f"files {self.text_key} {digest.hexdigest()}"

    def passages(self) -> Iterator[Passage]:
        total, before = sum(file.size for file in self.files), 0
        for file in self.files:
            with _opened(file) as opened:
                read = _READERS.get(file.path.suffix.lower(), _read_text)
                try:
                    for text, ends, share in read(opened, file.path, self.text_key):
                        yield Passage(text, ends, (before + share * file.size) / total)
                except SwarmError:
                    _check_unchanged(file, opened)  # that would explain it
                    raise
                _check_unchanged(file, opened)
            before += file.size


def _find(root: Path) -> Iterator[File]:
    if not root.is_dir():
        yield _look(root, root.name)
        return

    def refuse(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [each for each in subfolders if not each.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and stat.S_ISREG(path.lstat().st_mode):
                yield _look(path, path.relative_to(root).as_posix())


def _look(path: Path, name: str) -> File:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is neither a file nor a folder", remedy="name one of them")
    return File(name=name, path=path, size=found.st_size, changed_ns=found.st_mtime_ns)


def _opened(file: File) -> BufferedReader:
    try:
        opened = file.path.open("rb")
    except OSError as error:
        raise IntegrityError(f"{file.path} cannot be read: {error.strerror}", remedy="restore the file") from error
    try:
        _check_unchanged(file, opened)
    except BaseException:
        opened.close()
        raise
    return opened


def _check_unchanged(file: File, opened: BufferedReader) -> None:
    now = os.fstat(opened.fileno())
    if (now.st_size, now.st_mtime_ns) != (file.size, file.changed_ns):
        raise IntegrityError(f"{file.path} changed while it was read", remedy="start again once nothing writes to it")


def _read_text(file: BufferedReader, path: Path, _text_key: str) -> Pieces:
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = os.fstat(file.fileno()).st_size
    ends = size == 0
    while not ends:
        held, _ = decoder.getstate()
        start = file.tell() - len(held)
        data = _guarded(path, lambda: file.read(PASSAGE_LENGTH) + file.readline(PASSAGE_LENGTH))
        ends = file.tell() >= size or not data
        try:
            yield decoder.decode(data, final=ends), ends, file.tell() / size
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path} is not UTF-8 text: byte {start + error.start} is {error.reason}",
                remedy="convert it, or move it out of the folder",
            ) from error


def _read_json_lines(file: BufferedReader, path: Path, text_key: str) -> Pieces:
    size, number = os.fstat(file.fileno()).st_size, 0
    while line := _guarded(path, lambda: file.readline(MAX_LINE_BYTES + 1)):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"line {number} of {path} is over {MAX_LINE_BYTES} bytes", remedy="split its text")
        if line.strip():
            share = file.tell() / size
            for text, ends in cut(_text_of(line, f"line {number} of {path}", text_key)):
                yield text, ends, share


def _text_of(line: bytes, where: str, text_key: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON", remedy="correct or remove it") from error
    text = value.get(text_key) if isinstance(value, Mapping) else None
    if not isinstance(text, str):
        raise ConfigError(f"{where} has no text under {text_key!r}", remedy="the run's data.text_key names the key")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        raise ConfigError(f"{where} holds half of a character (a surrogate)", remedy="correct or remove it")
    return text


def _guarded(path: Path, read: Callable[[], bytes]) -> bytes:
    try:
        return read()
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}", remedy="restore the file") from error


_READERS: Mapping[str, Callable[[BufferedReader, Path, str], Pieces]] = {
    ".jsonl": _read_json_lines,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
}
