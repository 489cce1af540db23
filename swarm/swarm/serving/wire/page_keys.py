"""Names for the content of pages of keys and values: equal keys, equal content.

A page's key is a hash of its tokens and of the key before it, so it stands for the whole prefix. Clients compute the
keys of their prompt to ask for pages that a server may still have; a server computes those that it registers itself.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from swarm_protocol.limits import PAGE_TOKENS

KEY_BYTES = 16


def page_keys(revision: str, tokens: Sequence[int]) -> list[bytes]:
    """Return the keys of the full pages of `tokens`, for a model of that revision; a last page that is not full has
    none."""
    return PageKeyChain(root_key(revision)).extend(tokens)


def root_key(revision: str) -> bytes:
    """Return the key that stands before the first page of a model of that revision."""
    return hashlib.blake2b(revision.encode(), digest_size=KEY_BYTES, person=b"swarm-prefix").digest()


class PageKeyChain:
    """Keys of pages that fill up little by little, from the page after the one named `last_key`."""

    def __init__(self, last_key: bytes) -> None:
        self._last_key = last_key
        self._partial: list[int] = []

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the pages that these tokens complete. Token ids fit 32 bits."""
        pending = [*self._partial, *tokens]
        keys = []
        for index in range(len(pending) // PAGE_TOKENS):
            page = pending[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            content = self._last_key + struct.pack(f"<{PAGE_TOKENS}I", *page)
            self._last_key = hashlib.blake2b(content, digest_size=KEY_BYTES).digest()
            keys.append(self._last_key)
        self._partial = pending[len(keys) * PAGE_TOKENS :]
        return keys
