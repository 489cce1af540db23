"""Tokens on disk: written once, whole or not at all, and read in pieces by any thread.

    header (fixed, with its own checksum) · training tokens · validation tokens · CRC-32 of each block of both

Tokens are little-endian, with one, two or four bytes by the size of the vocabulary. Files are read by `pread` and not
mapped: a file that is truncated under a running trainer is an IntegrityError and not a signal. A block of the file is
checked against its checksum when it is first read, so a large file opens at once.
"""

from __future__ import annotations

import hashlib
import os
import struct
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray
from swarm_protocol.errors import IntegrityError

BLOCK_BYTES = 1 << 20
CHECKED_AT_ONCE = 256
"""Blocks that are checked on opening, in a quarter of a second. A small corpus is checked completely."""
_MAGIC = b"swarmtok"
_HEADER = struct.Struct("<8sIQQQ32sI")  # magic, token bytes, vocabulary, training and validation tokens, digest, table
_CRC = struct.Struct("<I")
_START = _HEADER.size + _CRC.size

Tokens: TypeAlias = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHeader:
    """The header of a token file. `digest` (hex, BLAKE2b-256) is of all tokens, their size and their split."""

    vocab_size: int
    num_train: int
    num_validation: int
    digest: str

    @property
    def item_bytes(self) -> int:
        return item_bytes(self.vocab_size)

    @property
    def num_bytes(self) -> int:
        return (self.num_train + self.num_validation) * self.item_bytes


def item_bytes(vocab_size: int) -> int:
    return 1 if vocab_size <= 1 << 8 else 2 if vocab_size <= 1 << 16 else 4


class TokenFile:
    """A token file that is open for reading. Raises IntegrityError if it is incomplete or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._file)
        self.header, table_crc = _parse(self._bytes(0, _START), path)
        num_blocks = -(-self.header.num_bytes // BLOCK_BYTES)
        table = self._bytes(_START + self.header.num_bytes, num_blocks * _CRC.size)
        if zlib.crc32(table) != table_crc:
            raise self._damaged()
        self._crc = np.frombuffer(table, "<u4")
        self._is_checked = np.zeros(num_blocks, bool)
        self._dtype = np.dtype(f"<u{self.header.item_bytes}")
        self._check(0, min(num_blocks, CHECKED_AT_ONCE) * BLOCK_BYTES)

    def read(self, first: int, num_tokens: int) -> Tokens:
        """Return tokens [first, first + num_tokens) of the file, which has validation tokens after training tokens.

        If they are damaged, this raises IntegrityError, and deletes the file, so that the next start makes it again.
        """
        start, size = first * self.header.item_bytes, num_tokens * self.header.item_bytes
        try:
            self._check(start, start + size)
            return np.frombuffer(self._bytes(_START + start, size), self._dtype)
        except IntegrityError:
            self.path.unlink(missing_ok=True)
            raise

    def _check(self, start: int, end: int) -> None:
        """Check the blocks that hold bytes [start, end) of the tokens, unless they were checked before."""
        for block in range(start // BLOCK_BYTES, min(-(-end // BLOCK_BYTES), len(self._crc))):
            if not self._is_checked[block]:
                offset = block * BLOCK_BYTES
                data = self._bytes(_START + offset, min(BLOCK_BYTES, self.header.num_bytes - offset))
                if zlib.crc32(data) != self._crc[block]:
                    raise self._damaged()
                self._is_checked[block] = True

    def _bytes(self, offset: int, size: int) -> bytes:
        try:
            data = os.pread(self._file, size, offset)
        except OSError as error:
            raise IntegrityError(f"{self.path} cannot be read: {error.strerror}") from error
        if len(data) != size:
            raise self._damaged()
        return data

    def _damaged(self) -> IntegrityError:
        return _damaged(self.path)


def read_header(path: Path) -> TokenHeader:
    """Read a file's header, without checking its tokens. Raises IntegrityError."""
    try:
        with path.open("rb") as file:
            header, _ = _parse(file.read(_START), path)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    return header


def digests_in(folder: Path) -> Iterator[str]:
    """Yield the digests of the token files in `folder`, without checking their tokens."""
    for path in sorted(folder.glob("*.tokens")):
        try:
            yield read_header(path).digest
        except IntegrityError:
            continue


def neighbour(path: Path) -> Path:
    """Return the path of the validation tokens until the file at `path` is complete."""
    return path.with_name(f"{path.name}.validation")


class TokenWriter:
    """Collects the tokens of one corpus in `path`, which is a token file once `finish` has returned, and its neighbour.

    Memory is bounded by what is added at once. Raises OSError as the disk does.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._dtype = np.dtype(f"<u{item_bytes(vocab_size)}")
        self._validation_path = neighbour(path)
        self._train = path.open("w+b")
        self._validation = self._validation_path.open("w+b")
        self._train.write(bytes(_START))
        self.num_train = 0
        self.num_validation = 0

    def add(self, tokens: NDArray[np.int64], *, held_out: bool) -> None:
        data = tokens.astype(self._dtype).tobytes()
        if held_out:
            self._validation.write(data)
            self.num_validation += len(tokens)
        else:
            self._train.write(data)
            self.num_train += len(tokens)

    def hold_out(self, num_tokens: int) -> None:
        """Hold out the last `num_tokens` of the training tokens. Only if nothing is held out yet."""
        assert not self.num_validation
        self.num_train -= num_tokens
        self.num_validation = num_tokens

    def finish(self) -> TokenHeader:
        """Complete the file, and flush it to the disk."""
        self._validation.seek(0)
        while data := self._validation.read(BLOCK_BYTES):
            self._train.write(data)
        digest = hashlib.blake2b(digest_size=32)
        digest.update(struct.pack("<IQQ", self._dtype.itemsize, self.num_train, self.num_validation))
        checksums = []
        for block in _blocks(self._train):
            digest.update(block)
            checksums.append(zlib.crc32(block))
        table = np.asarray(checksums, "<u4").tobytes()
        self._train.write(table)
        header = _HEADER.pack(
            _MAGIC,
            self._dtype.itemsize,
            self._vocab_size,
            self.num_train,
            self.num_validation,
            digest.digest(),
            zlib.crc32(table),
        )
        self._train.seek(0)
        self._train.write(header + _CRC.pack(zlib.crc32(header)))
        self._train.flush()
        os.fsync(self._train.fileno())
        return TokenHeader(
            vocab_size=self._vocab_size,
            num_train=self.num_train,
            num_validation=self.num_validation,
            digest=digest.hexdigest(),
        )

    def close(self) -> None:
        """Close both files, ignore errors, and delete the validation file."""
        for file in (self._train, self._validation):
            try:
                file.close()
            except OSError:
                continue  # the rest did not fit on the disk
        self._validation_path.unlink(missing_ok=True)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    file.seek(_START)
    while block := file.read(BLOCK_BYTES):
        yield block


def _parse(data: bytes, path: Path) -> tuple[TokenHeader, int]:
    """Return the header, and the checksum of the table of checksums."""
    if len(data) != _START or _CRC.pack(zlib.crc32(data[: _HEADER.size])) != data[_HEADER.size :]:
        raise _damaged(path)
    magic, size, vocab_size, num_train, num_validation, digest, table_crc = _HEADER.unpack(data[: _HEADER.size])
    if magic != _MAGIC or size != item_bytes(vocab_size):
        raise _damaged(path)
    header = TokenHeader(vocab_size=vocab_size, num_train=num_train, num_validation=num_validation, digest=digest.hex())
    return header, table_crc


def _damaged(path: Path) -> IntegrityError:
    return IntegrityError(
        f"the tokens in {path} are damaged or cut off", remedy="start again: the tokens are made again"
    )
