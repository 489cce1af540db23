"""Allocates the pages of the KV pool: reservations, shared pages, pages kept for prefixes, and their names.

A sequence reserves pages when it opens, and gets them one by one. One that grows beyond them reserves more, as long as
some are free. A page kept for a prefix is given up only when a new page is needed. Once a page is registered under a
key, it has the content that the key names, and is never written again. `peer_shares.PeerShares` decides how peers share
the pages.

Bookkeeping only: `KVPool` has the memory. No clock and no tasks; used in the engine's loop.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.wire.page_keys import KEY_BYTES, PageKeyChain, root_key


@dataclass(frozen=True, slots=True)
class PageInputs:
    """The inputs that a registered page was computed from: the digests of its own positions, and the digest `before` of
    all positions before them."""

    before: bytes
    digests: bytes

    @property
    def after(self) -> bytes:
        """The digest of all positions up to the end of the page."""
        return hashlib.blake2b(self.before + self.digests, digest_size=KEY_BYTES).digest()


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence, in the order of positions. The first `num_shared` must not be written. `num_promised`
    more are reserved."""

    pages: list[int]
    num_shared: int
    num_promised: int

    @property
    def num_pages(self) -> int:
        return len(self.pages) + self.num_promised


class PageAllocator:
    """Allocates the pages 0 … `num_pages` - 1. A page is blank, held by at least one page table, or held by none and
    kept for its key.

    Only the first `num_touched` pages have ever been held.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # only pages that were held before: a large cache of a small model has a hundred thousand that never are
        self._blank: list[int] = []
        self._num_holders: list[int] = []
        self._num_promised = 0
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._inputs_of: dict[int, PageInputs] = {}
        # pages held by none, least recently used first
        self._kept: dict[int, None] = {}

    @property
    def num_touched(self) -> int:
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        """The number of pages that can still be reserved."""
        return self.num_pages - self.num_touched + len(self._blank) + len(self._kept) - self._num_promised

    @property
    def num_kept(self) -> int:
        """The number of pages without a holder that are kept for their prefix."""
        return len(self._kept)

    def reserve(self, num_pages: int, keys: Sequence[bytes] = ()) -> PageTable | None:
        """Reserve `num_pages`. The first of them are the pages registered under `keys`, up to the first unknown key.

        Return None, and change nothing, if there is not enough room.
        """
        shared = []
        for key in keys[:num_pages]:
            if (page := self._page_of.get(key)) is None:
                break
            shared.append(page)
        num_promised = num_pages - len(shared)
        if num_promised + sum(page in self._kept for page in shared) > self.num_free:
            return None
        for page in shared:
            self._num_holders[page] += 1
            self._kept.pop(page, None)
        self._num_promised += num_promised
        return PageTable(pages=shared, num_shared=len(shared), num_promised=num_promised)

    def extend(self, page_table: PageTable, num_pages: int) -> bool:
        """Reserve more pages for the table, up to `num_pages` in all. Return False, and change nothing, if there is not
        enough room."""
        num_more = max(0, num_pages - page_table.num_pages)
        if num_more > self.num_free:
            return False
        page_table.num_promised += num_more
        self._num_promised += num_more
        return True

    def grow(self, page_table: PageTable, num_pages: int) -> None:
        """Give the table writable pages, up to `num_pages` in all, from its reservation."""
        num_new = max(0, num_pages - len(page_table.pages))
        assert num_new <= page_table.num_promised, "more pages than were reserved"
        for _ in range(num_new):
            if not self._blank and self.num_touched < self.num_pages:
                page = self.num_touched
                self._num_holders.append(0)
            else:
                if not self._blank:
                    self._forget(next(iter(self._kept)))
                page = self._blank.pop()
            self._num_holders[page] = 1
            page_table.pages.append(page)
        page_table.num_promised -= num_new
        self._num_promised -= num_new

    def empty(self, page_table: PageTable) -> None:
        """Give back the pages of a table that no other table shares, and reserve as many again."""
        num_pages = page_table.num_pages
        self.release(page_table)
        has_room = self.extend(page_table, num_pages)
        assert has_room

    def register(self, page_table: PageTable, index: int, key: bytes, inputs: PageInputs | None = None) -> None:
        """Record that the table's page at `index` has the content that `key` names, computed from `inputs` if these are
        known. The page must not be written again."""
        page = page_table.pages[index]
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key
            if inputs is not None:
                self._inputs_of[page] = inputs

    def unregister(self, page_table: PageTable) -> None:
        """Remove the keys of the table's pages, since their content may be wrong."""
        for page in page_table.pages:
            if (key := self._key_of.pop(page, None)) is not None:
                del self._page_of[key]
                self._inputs_of.pop(page, None)

    def inputs_of(self, page_table: PageTable) -> list[PageInputs | None]:
        """Return the inputs of the table's shared pages; None for each page whose inputs are not known."""
        return [self._inputs_of.get(page) for page in page_table.pages[: page_table.num_shared]]

    def release(self, page_table: PageTable) -> None:
        """Free the table's pages and its reservation. Does nothing for an empty table."""
        self._drop(page_table.pages)
        page_table.pages.clear()
        self._num_promised -= page_table.num_promised
        page_table.num_shared = page_table.num_promised = 0

    def num_freed_by(self, page_table: PageTable) -> int:
        """Return by how much a release of the table raises `num_free`."""
        return page_table.num_promised + sum(self._num_holders[page] == 1 for page in page_table.pages)

    def _drop(self, pages: Sequence[int]) -> None:
        # the last page first: a prefix without its beginning is useless, so its end must be forgotten earlier
        for page in reversed(pages):
            self._num_holders[page] -= 1
            if self._num_holders[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._blank.append(page)

    def _forget(self, page: int) -> None:
        del self._kept[page]
        del self._page_of[self._key_of.pop(page)]
        self._inputs_of.pop(page, None)
        self._blank.append(page)


class PageNames:
    """The names under which the pages of one sequence on blocks [start, end) are registered when they are full, so that
    later sequences find them.

    If `start` is 0, the content follows from the tokens, so all clients can share it: keys are computed from the tokens
    that were run. Otherwise it follows from the client's rows, which are not checked: the keys are those that the
    client has `given`, and only this client finds them. A name also has the key of the page before: otherwise a client
    that gives keys in another order could make others use pages that were computed after the wrong ones.
    """

    def __init__(self, revision: str, client: str, start: int, end: int, given: Sequence[bytes]) -> None:
        self._scope = f"{start}:{end}:{client if start else ''}:".encode()
        self._given = tuple(given)
        self._root = None if start else root_key(revision)
        self.begin(0)

    @property
    def wanted(self) -> list[bytes]:
        """The names of the content that the client wants in its first pages."""
        return [self._name(before, key) for before, key in itertools.pairwise((b"", *self._given))]

    def begin(self, num_pages: int) -> None:
        """Start to name pages at index `num_pages`. The pages before have the `wanted` content."""
        self._num_named = num_pages
        self._before = self._given[num_pages - 1] if num_pages and self._given else b""
        self._chain = None
        if self._root is not None:
            self._chain = PageKeyChain(self._before or self._root)

    def stop(self) -> None:
        """Name no more pages: their content comes from another server."""
        self._root, self._chain, self._given = None, None, ()

    def filled(self, tokens: Sequence[int], length: int) -> Iterator[tuple[int, bytes]]:
        """Yield the index and name of each page that has become full. `length` positions are held, the last ones with
        `tokens`.

        There are no tokens if the sequence does not begin at block 0.
        """
        if self._chain is not None:
            keys: Sequence[bytes] = self._chain.extend(tokens)
        else:
            keys = self._given[self._num_named : length // PAGE_TOKENS]
        for key in keys:
            yield self._num_named, self._name(self._before, key)
            self._before = key
            self._num_named += 1

    def _name(self, before: bytes, key: bytes) -> bytes:
        return self._scope + before + key
