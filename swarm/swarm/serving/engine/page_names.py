"""The names under which the pages of one sequence are registered, so that other sequences find them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.wire.page_keys import PageKeyChain, root_key


class PageNames:
    """The names under which the pages of one sequence on blocks [start, end) are registered as they fill.

    Before block 0 content follows from the tokens, so that all clients can share it: the names are computed from the
    tokens that were really run. Further on it follows from what the client sent, which is not checked: the names are
    those that the client has `given`, and only this client finds them again.
    """

    def __init__(self, revision: str, client: str, start: int, end: int, given: Sequence[bytes]) -> None:
        self._scope = f"{start}:{end}:{client if start else ''}:".encode()
        self._given = tuple(given)
        self._root = None if start else root_key(revision)
        self.begin(0)

    @property
    def wanted(self) -> list[bytes]:
        """The names of the content that the client expects in its first pages."""
        return [self._scope + key for key in self._given]

    def begin(self, num_pages: int) -> None:
        """Pages are named from `num_pages` on; those before hold what was `wanted`."""
        self._num_named = num_pages
        self._chain = None
        if self._root is not None:
            self._chain = PageKeyChain(self._given[num_pages - 1] if num_pages else self._root)

    def stop(self) -> None:
        """Name no more pages: what they hold came from elsewhere."""
        self._root, self._chain, self._given = None, None, ()

    def filled(self, tokens: Sequence[int], length: int) -> Iterator[tuple[int, bytes]]:
        """Yield the index and name of each page that is full now that `length` positions are held, `tokens` the last
        ones.

        Without block 0 there are no tokens.
        """
        if self._chain is not None:
            keys: Sequence[bytes] = self._chain.extend(tokens)
        else:
            keys = self._given[self._num_named : length // PAGE_TOKENS]
        for key in keys:
            yield self._num_named, self._scope + key
            self._num_named += 1
