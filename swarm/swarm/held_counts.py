"""Counts of what each peer or caller holds, without those that hold nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

K = TypeVar("K")


class HeldCounts(Counter[K]):
    """Counts by key. A key is dropped once its count is 0, since anyone can make any number of keys."""

    def __setitem__(self, key: K, num: int) -> None:
        if num:
            super().__setitem__(key, num)
        else:
            self.pop(key, None)

    @contextmanager
    def holding(self, key: K, num: int = 1) -> Iterator[None]:
        """Count `num` more of `key` while the context lasts."""
        self[key] += num
        try:
            yield
        finally:
            self[key] -= num
