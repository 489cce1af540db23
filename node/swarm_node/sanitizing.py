"""What peers and users wrote, made fit for a terminal: one line, nothing that moves the cursor or turns the text."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def clean(text: str, width: int) -> str:
    """At most `width` cells of `text`; control characters, line ends and direction overrides are replaced.

    The text is not markup: whoever prints it passes it as `rich.text.Text`, never as a string.
    """
    width = max(1, width)
    head = "".join(letter if letter.isprintable() else REPLACEMENT for letter in text[: width + 1])
    if len(text) <= width and cell_len(head) <= width:
        return head
    return set_cell_size(head, width - 1).rstrip() + "…"
