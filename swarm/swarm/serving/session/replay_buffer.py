"""The client's copy of what went into a span: rows as they were on the wire, so that another server can be fed them.

A row has a fixed number of bytes, whatever the codec, and rows can be cut anywhere.
"""

from __future__ import annotations

from swarm_protocol.rows import Data


class Ledger:
    """`length` rows of `row_bytes` each, the first one at position 0."""

    __slots__ = ("_rows", "length", "row_bytes")

    def __init__(self, row_bytes: int) -> None:
        assert row_bytes > 0
        self.length = 0
        self.row_bytes = row_bytes
        self._rows = bytearray()

    def append(self, rows: Data) -> None:
        num_rows, rest = divmod(len(rows), self.row_bytes)
        assert not rest, "a part of a row"
        self._rows += rows
        self.length += num_rows

    def rows(self, start: int, end: int) -> bytes:
        assert 0 <= start < end <= self.length
        with memoryview(self._rows) as view:
            return bytes(view[start * self.row_bytes : end * self.row_bytes])
