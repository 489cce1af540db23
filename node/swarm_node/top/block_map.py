"""Draws which servers hold which blocks of a model, and how a loss went, in rows of characters.

A model may have more blocks than a row has cells: a cell then stands for several blocks, and tells of the worst.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FULL, PART, NONE = "█", "▒", "·"
BARS = "▁▂▃▄▅▆▇█"


def cell_spans(num_blocks: int, width: int) -> list[tuple[int, int]]:
    """The blocks `[start, end)` of each cell, at most `width` of them; none is empty."""
    cells = max(0, min(num_blocks, width))
    return [(num_blocks * cell // cells, num_blocks * (cell + 1) // cells) for cell in range(cells)]


def span_row(start: int, end: int, num_blocks: int, width: int) -> str:
    """A server's blocks `[start, end)`: a full cell is served in whole, a grey one in part."""
    return "".join(_filled(start, end, cell) for cell in cell_spans(num_blocks, width))


def _filled(start: int, end: int, cell: tuple[int, int]) -> str:
    covered = min(end, cell[1]) - max(start, cell[0])
    if covered <= 0:
        return NONE
    return FULL if covered == cell[1] - cell[0] else PART


def replica_row(replicas: Sequence[int], width: int) -> str:
    """How many servers the worst block of each cell has: a digit, `+` for more than nine, `·` for none."""
    worst = [min(replicas[start:end]) for start, end in cell_spans(len(replicas), width)]
    return "".join(NONE if number <= 0 else str(number) if number < 10 else "+" for number in worst)


def missing_row(missing: Sequence[tuple[int, int]], num_blocks: int, width: int) -> str:
    """A model's blocks where only the gaps are known: full where each block has a server."""
    return "".join(
        NONE if any(start < cell[1] and cell[0] < end for start, end in missing) else FULL
        for cell in cell_spans(num_blocks, width)
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values as bars, the lowest being the shortest; those that are no numbers are left out."""
    shown = [value for value in values if math.isfinite(value)][-width:] if width > 0 else []
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)
