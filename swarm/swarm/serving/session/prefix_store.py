"""The rows of prompts' pages that a client keeps after a session: a server may still hold the keys and values of these
pages, but a client survives that server's death only if it has their inputs, too.

Plain values without I/O. The client owns its store, and its sessions fill their buffers from it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swarm_protocol.limits import PAGE_TOKENS

from swarm.serving.session.pipeline import ReplayBuffer

MAX_PREFIX_BYTES = 256 * 2**20
"""Thousands of tokens at the boundaries of a large model; a session's own buffers may hold as much."""


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
