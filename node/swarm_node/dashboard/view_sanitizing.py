"""Makes what peers and users wrote fit to be shown: one line of printable text. The one place where views are cleaned.

The protocol refuses most of it already; this is for what reaches a view another way, such as a file or an error.
Escaping for HTML is for whoever writes HTML.
"""

from __future__ import annotations

import unicodedata

from swarm_node.formatting import plural

MAX_SHOWN_CHARS = 300
MAX_MARKS = 2
"""Combining marks on one letter: living languages need no more."""

NOTHING = "—"
MAX_SPANS = 4


def shown(text: str, *, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """`text` made `plain`; "—" if that shows nothing."""
    return plain(text, max_chars) or NOTHING


def plain(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """`text` in one line of at most `max_chars`, cut with "…": controls, bidirectional overrides and what cannot be
    seen are blanks, piles of combining marks are cut.

    `str.isprintable` is false for all of Unicode's "other" and "separator" categories but the space.
    """
    # cut first, so that ten megabytes cost no more than a line; what is taken out makes the line shorter, no more
    line = text[: 4 * max_chars]
    if not (line.isascii() and line.isprintable()):
        line = _legible(line)
    line = " ".join(line.split())
    return line if len(line) <= max_chars else f"{line[: max_chars - 1]}…"


def _legible(text: str) -> str:
    kept: list[str] = []
    num_marks = 0
    for character in text:
        num_marks = num_marks + 1 if unicodedata.category(character) in {"Mn", "Me"} else 0
        if num_marks <= MAX_MARKS:
            kept.append(character if character.isprintable() else " ")
    return "".join(kept)


def blocks(spans: tuple[tuple[int, int], ...], num_blocks: int) -> str:
    """Name the blocks of half-open spans: "blocks 4:8 and 10:11 of 32", "block 3 of 32"; of many the first."""
    told = [f"{start}:{end}" for start, end in spans[:MAX_SPANS]]
    if is_single_block(spans):
        told = [str(spans[0][0])]
    if more := len(spans) - len(told):
        told.append(f"{plural(more, 'more span')}")
    *others, last = told
    noun = "block" if is_single_block(spans) else "blocks"
    return f"{noun} {', '.join(others)}{' and ' if others else ''}{last} of {num_blocks}"


def is_single_block(spans: tuple[tuple[int, int], ...]) -> bool:
    return sum(end - start for start, end in spans) == 1


def ending(peer_id: str) -> str:
    """What stands for the name of a node that is not known."""
    return f"…{peer_id[-8:]}"
