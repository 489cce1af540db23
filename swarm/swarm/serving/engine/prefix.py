"""Names for what a page of keys and values holds: equal keys, equal content.

A page's key is a hash of its tokens and of the key before it, so it stands for the whole prefix. Clients compute keys
of their prompt to ask for pages that a server may still have; the engine computes those it registers itself.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

from swarm.serving.model.batch import PAGE_TOKENS

KEY_BYTES = 16


def page_keys(revision: str, tokens: Sequence[int]) -> list[bytes]:
    """The keys of the full pages of `tokens`, for a model of that revision; a last page that is not full has none."""
    return PageKeyChain(root_key(revision)).extend(tokens)


def root_key(revision: str) -> bytes:
    """What stands before the first page."""
    return hashlib.blake2b(revision.encode(), digest_size=KEY_BYTES, person=b"swarm-prefix").digest()


class PageKeyChain:
    """Keys of pages that fill up little by little, from the page after the one named `last_key`."""

    def __init__(self, last_key: bytes) -> None:
        self._last_key = last_key
        self._partial: list[int] = []

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of the pages that these tokens complete. Token ids fit 32 bits."""
        pending = [*self._partial, *tokens]
        keys = []
        for index in range(len(pending) // PAGE_TOKENS):
            page = pending[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            content = self._last_key + struct.pack(f"<{PAGE_TOKENS}I", *page)
            self._last_key = hashlib.blake2b(content, digest_size=KEY_BYTES).digest()
            keys.append(self._last_key)
        self._partial = pending[len(keys) * PAGE_TOKENS :]
        return keys


class PageKeys:
    """The names under which the pages of one sequence on blocks [start, end) are registered as they fill.

    Before block 0 content follows from the tokens, so that all clients can share it: the names are computed from the
    tokens that were really run. Further on it follows from what the client sent, which nobody checks: the names are
    those that it `given`, and only this client finds them again.
    """

    def __init__(self, revision: str, client: str, start: int, end: int, given: Sequence[bytes]) -> None:
        self._scope = f"{start}:{end}:{client if start else ''}:".encode()
        self._given = tuple(given)
        self._root = None if start else root_key(revision)
        self.begin(0)

    @property
    def wanted(self) -> list[bytes]:
        """What the client expects in its first pages."""
        return [self._scope + key for key in self._given]

    def begin(self, num_pages: int) -> None:
        """Pages are named from `num_pages` on; those before hold what was `wanted`."""
        self._num_named = num_pages
        self._chain = None
        if self._root is not None:
            self._chain = PageKeyChain(self._given[num_pages - 1] if num_pages else self._root)

    def stop(self) -> None:
        """Name nothing any more: what the pages hold came from elsewhere."""
        self._root, self._chain, self._given = None, None, ()

    def filled(self, tokens: Sequence[int], length: int) -> Iterator[tuple[int, bytes]]:
        """The index and name of each page that is full now that `length` positions are held, `tokens` the last ones.

        Without block 0 there are no tokens.
        """
        if self._chain is not None:
            keys: Sequence[bytes] = self._chain.extend(tokens)
        else:
            keys = self._given[self._num_named : length // PAGE_TOKENS]
        for key in keys:
            yield self._num_named, self._scope + key
            self._num_named += 1
