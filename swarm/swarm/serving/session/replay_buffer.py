"""Keeps the rows that went into a span, to feed another server with them if the span's server is lost.

Pure: `pipeline` fills the buffers of a session, and chooses what is sent from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swarm_protocol.errors import ConfigError, PeerViolation
from swarm_protocol.rows import Data


class ReplayMemoryFull(ConfigError):
    """The rows that a session keeps to survive failures would take more memory than is allowed."""

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"surviving a failure would take {num_bytes} bytes here, and {max_bytes} are allowed",
            remedy="ask for fewer tokens or allow more memory",
        )


class ReplayBuffer:
    """The client's copy of a span's inputs, as they were on the wire, with which another server can be fed.

    It has `length` rows of `row_bytes` each, the first one at position 0. With every codec, each row stands alone.
    """

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

    def append_new(self, rows: Data, end: int) -> None:
        """Append those of a server's rows, which end before position `end`, that are not known yet.

        Raises PeerViolation if rows before them are missing.
        """
        if end <= self.length:
            return
        first = end - len(rows) // self.row_bytes
        if first > self.length:
            raise PeerViolation("the server left out what was asked for")
        self.append(rows[(self.length - first) * self.row_bytes :])

    def rows(self, start: int, end: int) -> bytes:
        assert 0 <= start < end <= self.length
        with memoryview(self._rows) as view:
            return bytes(view[start * self.row_bytes : end * self.row_bytes])


class ReplayBuffers(dict[int, ReplayBuffer]):
    """The buffers of one session by the first block of each span. `new_buffer(block)` makes one."""

    def __init__(self, new_buffer: Callable[[int], ReplayBuffer]) -> None:
        super().__init__({0: new_buffer(0)})
        self._new_buffer = new_buffer

    def add(self, blocks: Iterable[int]) -> None:
        """Make the buffers of spans that begin at new blocks."""
        self.update({block: self._new_buffer(block) for block in set(blocks) - self.keys()})

    def keep(self, blocks: set[int]) -> None:
        """Drop all buffers but those of spans that begin at these blocks."""
        for block in self.keys() - blocks:
            del self[block]

    def forget_outputs(self) -> None:
        """Forget the rows that servers sent: all rows are computed again, from the tokens."""
        self.update({block: ReplayBuffer(buffer.row_bytes) for block, buffer in self.items() if block})
