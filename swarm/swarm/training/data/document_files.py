"""The files that a member names as its data, as documents in passages.

A text file is one document; so is each line of JSON, and each row of a parquet or arrow file, for which pyarrow comes
with the extra `swarm-node[data]`. Hidden files and links are skipped. Files of no known kind must be UTF-8 text. Memory
is bounded by a passage, a line, or a parquet row group. No file is mapped into memory, so a file that shrinks while it
is read causes an error, not a signal. A file that changes, shrinks or vanishes after it was found is an IntegrityError
that names it. Blocks. No state.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from swarm_protocol.errors import ConfigError, IntegrityError, SwarmError, one_line

from swarm.training.data.source import PASSAGE_LENGTH, Passage, cut

_ROWS = 256

MAX_LINE_BYTES = 1 << 26
"""Maximum length of a line of JSON, which is held in memory."""


def read_parquet(file: BufferedReader, path: Path, text_key: str) -> Iterator[tuple[str, bool, float]]:
    """Yield texts, whether each ends its document, and the share of the file that has been read after it."""
    with _translated_errors(path):
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415

        table = ParquetFile(file, memory_map=False)
        _check_column(table.schema_arrow, path, text_key)
        batches = table.iter_batches(batch_size=_ROWS, columns=[text_key])
        yield from _texts(batches, table.metadata.num_rows, text_key)


def read_arrow(file: BufferedReader, path: Path, text_key: str) -> Iterator[tuple[str, bool, float]]:
    """Read the arrow file format or stream format. Feather files have the file format."""
    with _translated_errors(path):
        from pyarrow import ipc  # noqa: PLC0415

        is_file = file.peek(6)[:6] == b"ARROW1"
        if not is_file:
            reader = ipc.open_stream(file)
            _check_column(reader.schema, path, text_key)
            yield from _texts(reader, 0, text_key)
            return
        table = ipc.open_file(file)
        _check_column(table.schema, path, text_key)
        count = table.num_record_batches
        for index in range(count):
            for text, ends, share in _texts([table.get_batch(index)], 0, text_key):
                yield text, ends, (index + share) / count


def _texts(batches: Any, num_rows: int, text_key: str) -> Iterator[tuple[str, bool, float]]:
    done = 0
    for batch in batches:
        column = batch.column(batch.schema.get_field_index(text_key))
        for start in range(0, len(column), _ROWS):
            rows = column.slice(start, _ROWS).to_pylist()
            done += len(rows)
            share = min(1.0, done / num_rows) if num_rows else 0.0
            for text in rows:
                if text is not None:
                    for piece, ends in cut(text):
                        yield piece, ends, share


def _check_column(schema: Any, path: Path, text_key: str) -> None:
    from pyarrow import types  # noqa: PLC0415

    index = schema.get_field_index(text_key)
    if index < 0:
        names = ", ".join(schema.names[:20])
        raise ConfigError(
            f"{path} has no column {text_key!r}: it has {names}",
            remedy="set the run's data.text_key to the column of the text",
        )
    kind = schema.field(index).type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise ConfigError(
            f"column {text_key!r} of {path} is {kind}, not text",
            remedy="set the run's data.text_key to the column of the text",
        )


@contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    """Translate pyarrow's errors to ConfigError or IntegrityError with a message of one line."""
    try:
        yield
    except SwarmError:
        raise
    except ImportError as error:
        raise ConfigError(f"{path} cannot be read without pyarrow", remedy="pip install 'swarm-node[data]'") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} holds text that is not UTF-8", remedy="correct or remove it") from error
    except Exception as error:  # pyarrow's errors have no other common base
        raise IntegrityError(f"{path} is damaged: {one_line(error)}", remedy="restore the file") from error


Pieces = Iterator[tuple[str, bool, float]]
"""The texts of one file, whether each ends its document, and the share of the file that has been read after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file as it was found. `name` is its path below the folder that the member named."""

    name: str
    path: Path
    size: int
    changed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """Implements `DocumentSource`. `text_key` is the column or key that holds the text."""

    root: Path
    files: tuple[File, ...]
    text_key: str

    @classmethod
    def find(cls, root: Path, text_key: str) -> FileSource:
        """Find a file, or all files of a folder. Raises ConfigError if there is nothing to read."""
        try:
            files = tuple(sorted(_find(root), key=lambda file: file.name))
        except OSError as error:
            raise ConfigError(
                f"{error.filename or root} cannot be read: {error.strerror}",
                remedy="name a file or folder that can be read",
            ) from error
        if not any(file.size for file in files):
            raise ConfigError(f"there is no text in {root}", remedy="name a file, or a folder with files")
        return cls(root=root, files=files, text_key=text_key)

    @property
    def name(self) -> str:
        return str(self.root)

    @property
    def key(self) -> str:
        """A digest of names, sizes and modification times; to read all files on each start would take minutes."""
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
                    _check_unchanged(file, opened)  # a change would explain the error
                    raise
                _check_unchanged(file, opened)
            before += file.size


def _find(root: Path) -> Iterator[File]:
    if not root.is_dir():
        yield _file_at(root, root.name)
        return

    def refuse(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [each for each in subfolders if not each.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and stat.S_ISREG(path.lstat().st_mode):
                yield _file_at(path, path.relative_to(root).as_posix())


def _file_at(path: Path, name: str) -> File:
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
        raise ConfigError(
            f"{where} has no text under {text_key!r}", remedy="set the run's data.text_key to the key of the text"
        )
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
