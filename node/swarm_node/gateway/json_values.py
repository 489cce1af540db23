"""Counts the objects, lists and texts in JSON before it is parsed."""

from __future__ import annotations

from collections.abc import Sequence


def has_more_values(documents: Sequence[bytes | bytearray], most: int) -> bool:
    """Return whether `documents` have more than `most` objects, lists and texts together."""
    # what the texts hold counts only where it makes a difference, since to leave it out takes longer
    return sum(map(_num_values, documents)) > most and sum(_num_outside(each, most) for each in documents) > most


def _num_values(document: bytes | bytearray) -> int:
    return document.count(b"{") + document.count(b"[") + document.count(b'"') // 2


def _num_outside(document: bytes | bytearray, most: int) -> int:
    """Count the values of JSON in UTF-8, which has no zero byte; in UTF-16 what texts hold counts, too."""
    return _num_values(document if b"\0" in document else _without_texts(document, most))


def _without_texts(document: bytes | bytearray, most: int) -> bytes | bytearray:
    """Return the JSON with nothing in its texts, unless these alone are more than `most`."""
    unescaped = document.replace(b"\\\\", b"").replace(b'\\"', b"")
    return unescaped if unescaped.count(b'"') > 2 * most else b'""'.join(unescaped.split(b'"')[::2])
