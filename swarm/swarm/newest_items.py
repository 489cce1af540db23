"""A dictionary with a bound, for what is remembered of peers."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class NewestItems(OrderedDict[K, V]):
    """Keeps the `most` items that were set last. Setting an item makes it the newest one, even if it was there."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
