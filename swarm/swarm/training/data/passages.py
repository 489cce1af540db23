"""Texts as they come out of a source: documents in passages of a bounded length, in a fixed order. Values only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

PASSAGE_LENGTH = 1 << 16
"""A document is cut at the first end of a line after so many characters, or at twice as many without one."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document; with `ends` its last. `share` of the source has been read with it."""

    text: str
    ends: bool
    share: float


class Source(Protocol):
    """Documents in an order that depends on nothing but what they are called or where they stand."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def key(self) -> str:
        """Another one whenever the content may be another one."""

    def passages(self) -> Iterator[Passage]:
        """Raises ConfigError for what is no text, IntegrityError if the source changes meanwhile."""


def cut(text: str) -> Iterator[tuple[str, bool]]:
    """The passages of a whole document, and whether each is its last."""
    start = 0
    while len(text) - start > 2 * PASSAGE_LENGTH:
        end = text.find("\n", start + PASSAGE_LENGTH, start + 2 * PASSAGE_LENGTH) + 1 or start + 2 * PASSAGE_LENGTH
        yield text[start:end], False
        start = end
    yield text[start:], True
