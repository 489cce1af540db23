"""Keeps what was made of a record while it is the same: most are signed anew twice a minute, not each second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

R = TypeVar("R")
V = TypeVar("V")


class Made(Generic[R, V]):
    """Of each peer the newest. Membership gives the same object again for a record that it has read already."""

    def __init__(self, make: Callable[[str, R], V]) -> None:
        self._make = make
        self._made: dict[str, tuple[R, V]] = {}

    def of(self, records: Mapping[str, R]) -> dict[str, V]:
        """By peer id. Of those that are not in `records` nothing is kept."""
        before = self._made
        self._made = {peer_id: self._one(before.get(peer_id), peer_id, record) for peer_id, record in records.items()}
        return {peer_id: view for peer_id, (_, view) in self._made.items()}

    def _one(self, before: tuple[R, V] | None, peer_id: str, record: R) -> tuple[R, V]:
        return before if before is not None and before[0] is record else (record, self._make(peer_id, record))
