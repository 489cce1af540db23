"""The client's copy of what went into a span: rows as they were on the wire, so that another server can be fed them.

The rows of a prompt's pages are kept in the client's `PrefixStore` after the session: a server may still hold the keys
and values of these pages, but a client survives that server's death only if it has their inputs too. Plain values
without I/O, which `pipeline` and the session change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swarm_protocol.limits import PAGE_TOKENS
from swarm_protocol.rows import Data

MAX_PREFIX_BYTES = 256 * 2**20
"""Thousands of tokens at the boundaries of a large model; a session's own buffers may hold as much."""


class ReplayBuffer:
    """`length` rows of `row_bytes` each, the first one at position 0. Rows can be cut anywhere, whatever the codec."""

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


class PrefixStore:
    """Pages of encoded rows by page key, which stands for the codec too, and block. The longest unused go first."""

    def __init__(self, max_bytes: int = MAX_PREFIX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._pages: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()

    def keep(self, keys: Sequence[bytes], block: int, buffer: ReplayBuffer) -> None:
        """Remember the inputs of `block` for the pages with these keys, as far as the buffer has them."""
        # the first pages last, for without them the others are of no use
        for index in reversed(range(min(len(keys), buffer.length // PAGE_TOKENS))):
            name = keys[index], block
            if name in self._pages:
                self._pages.move_to_end(name)
                continue
            page = buffer.rows(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)
            self._pages[name] = page
            self.num_bytes += len(page)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._pages.popitem(last=False)[1])

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget the inputs of all blocks for the pages with these keys."""
        gone = set(keys)
        for name in [name for name in self._pages if name[0] in gone]:
            self.num_bytes -= len(self._pages.pop(name))

    def fill(self, keys: Sequence[bytes], block: int, buffer: ReplayBuffer) -> None:
        """Append to an empty buffer the pages that are known, without a gap."""
        assert not buffer.length
        for key in keys:
            page = self._pages.get((key, block))
            if page is None:
                return
            buffer.append(page)
