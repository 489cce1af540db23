"""Implements Merkle trees: one digest that commits to many leaves, and short proofs that some leaves are in the tree
(Merkle 1987).

A leaf's digest is `sha256(0x00 | data)`, that of a node above `sha256(0x01 | left | right)`; the first bytes keep a
node from being passed off as a leaf. If a level has an odd number of nodes, the missing right one counts as 32 zero
bytes. The root does not contain the number of leaves, which the checker of a proof must know from elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from swarm_protocol.limits import DIGEST_BYTES

_ABSENT = bytes(DIGEST_BYTES)


def leaf_digest(*pieces: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of the leaf that consists of `pieces`, one after the other."""
    digest = hashlib.sha256(b"\x00")
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def root_above(num_leaves: int, index: int, leaf: bytes, proof: Sequence[bytes]) -> bytes:
    """Return the root of a tree whose leaf `index` has the digest `leaf`, as `proof` (see `HashTree.proof`) shows it.

    The caller must check that the root is the right one. Raises ValueError if the numbers do not fit.
    """
    return HashTree.proven(num_leaves, index, [leaf], proof).root


class HashTree:
    """A tree over `num_leaves` leaves, or the part of it that a proof shows. A whole tree takes 64 bytes a leaf, since
    files of weights have a million leaves."""

    def __init__(self, num_leaves: int) -> None:
        """Make a tree without nodes. Use `of` or `proven` instead."""
        self.num_leaves = num_leaves
        self._levels: list[tuple[int, bytes]] = []
        """For each level, from the leaves up, the index of the first known node, and all nodes from there on."""

    @classmethod
    def of(cls, leaves: Sequence[bytes]) -> HashTree:
        """Return the whole tree over `leaves`, which are digests. Raises ValueError if there are none."""
        return cls.proven(len(leaves), 0, leaves, ())

    @classmethod
    def proven(cls, num_leaves: int, start: int, leaves: Sequence[bytes], proof: Sequence[bytes]) -> HashTree:
        """Return the part of a tree that `proof` (see `proof`) shows: the leaves from `start` on, and the nodes above
        them.

        The caller must check that the root is the right one. Raises ValueError if the numbers do not fit.
        """
        if not leaves or not 0 <= start <= num_leaves - len(leaves):
            raise ValueError(f"{len(leaves)} leaves from {start} on in a tree of {num_leaves}")
        tree, low, high, siblings = cls(num_leaves), start, start + len(leaves), iter(proof)
        if set(map(len, leaves)) != {DIGEST_BYTES}:
            raise ValueError("a leaf is not a digest")
        nodes = list(leaves)
        for width in _widths(num_leaves):
            if low % 2:
                low, nodes = low - 1, [_next(siblings), *nodes]
            if high % 2 and width > 1:
                nodes.append(_next(siblings) if high < width else _ABSENT)
                high += 1
            tree._levels.append((low, b"".join(nodes)))
            nodes = list(map(_parent, nodes[::2], nodes[1::2]))
            low, high = low // 2, high // 2
        if next(siblings, None) is not None:
            raise ValueError("a proof has too many digests")
        return tree

    @property
    def root(self) -> bytes:
        return self._levels[-1][1]

    def leaves(self, start: int, stop: int) -> list[bytes]:
        """Return the digests of leaves [start, stop), which the tree must hold."""
        return [self._node(0, index) for index in range(start, stop)]

    def proof(self, start: int, stop: int) -> list[bytes]:
        """Return the digests that lead, together with leaves [start, stop), to the root."""
        digests, low, high = [], start, stop
        for level, width in enumerate(_widths(self.num_leaves)):
            if low % 2:
                low -= 1
                digests.append(self._node(level, low))
            if high % 2 and width > 1:
                if high < width:
                    digests.append(self._node(level, high))
                high += 1
            low, high = low // 2, high // 2
        return digests

    def _node(self, level: int, index: int) -> bytes:
        first, nodes = self._levels[level]
        at = (index - first) * DIGEST_BYTES
        if not 0 <= at < len(nodes):
            raise IndexError(f"the tree does not hold node {index} of level {level}")
        return nodes[at : at + DIGEST_BYTES]


def _widths(num_leaves: int) -> Iterator[int]:
    """Yield how many nodes each level has, from the leaves to the root."""
    while num_leaves > 1:
        yield num_leaves
        num_leaves = (num_leaves + 1) // 2
    yield 1


def _parent(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def _next(siblings: Iterator[bytes]) -> bytes:
    digest = next(siblings, None)
    if digest is None or len(digest) != DIGEST_BYTES:
        raise ValueError("a proof has too few digests")
    return digest
