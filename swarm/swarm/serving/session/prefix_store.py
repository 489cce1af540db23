"""Rows that a client saw at the boundaries between spans, kept after their session, to start later ones further on.

A server may still hold the keys and values of a prompt's first pages; a client that wants to survive that server's
death needs the inputs of these pages too. They are found by the key of the page, which stands for its whole prefix.

One per client, shared by its sessions; touched only from its event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swarm.serving.model.batch import PAGE_TOKENS
from swarm.serving.session.replay_buffer import Ledger

MAX_BYTES = 256 * 2**20
"""Thousands of tokens at the boundaries of a large model; a session's own ledgers may hold as much."""


class PrefixStore:
    """Pages of encoded rows by page key, which stands for the codec too, and block. The longest unused go first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._pages: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()

    def keep(self, keys: Sequence[bytes], block: int, ledger: Ledger) -> None:
        """Remember the inputs of `block` for the pages with these keys, as far as the ledger has them."""
        # the first pages last, for without them the others are of no use
        for index in reversed(range(min(len(keys), ledger.length // PAGE_TOKENS))):
            name = keys[index], block
            if name in self._pages:
                self._pages.move_to_end(name)
                continue
            page = ledger.rows(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)
            self._pages[name] = page
            self.num_bytes += len(page)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._pages.popitem(last=False)[1])

    def fill(self, keys: Sequence[bytes], block: int, ledger: Ledger) -> None:
        """Append to an empty ledger the pages that are known, without a gap."""
        assert not ledger.length
        for key in keys:
            page = self._pages.get((key, block))
            if page is None:
                return
            ledger.append(page)
