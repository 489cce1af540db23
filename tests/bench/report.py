"""Writes the reports of benchmarks: an aligned table for people, and a JSON line for each row for comparisons of
runs."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path

import pytest

BENCH_FILE = Path("build/bench.jsonl")


def aim(**reached: bool) -> None:
    """Mark what follows as an aim of the project that may not have been reached yet. A bench that misses aims is shown
    as an expected failure that names them (`make bench` lists these), and passes once all are `reached`. Check aims at
    the end of a bench."""
    if missed := [name.replace("_", " ") for name, is_reached in reached.items() if not is_reached]:
        pytest.xfail(f"not reached: {', '.join(missed)}")


class Report:
    """Rows of figures under one title. Columns are named with their unit: `unary_ms`, `stream_MB_per_s`."""

    def __init__(self, title: str, file: Path = BENCH_FILE) -> None:
        self.title = title
        self.rows: dict[str, dict[str, float | str]] = {}
        self._file = file

    def row(self, name: str, **figures: float | str) -> Report:
        """Add `figures` to the row `name`, which is made if it is new."""
        self.rows.setdefault(name, {}).update(figures)
        return self

    def show(self) -> None:
        """Print the table, and append the rows to the file."""
        print(f"\n{self.table()}")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as lines:
            for name, figures in self.rows.items():
                line = {"bench": self.title, "name": name, **figures, "machine": platform.node(), "time": time.time()}
                lines.write(json.dumps(line) + "\n")

    def table(self) -> str:
        columns = list(dict.fromkeys(column for figures in self.rows.values() for column in figures))
        lines = [["", *columns]]
        lines += [
            [name, *(_text(figures.get(column, "")) for column in columns)] for name, figures in self.rows.items()
        ]
        widths = [max(len(line[index]) for line in lines) for index in range(len(columns) + 1)]
        body = (
            "  ".join(
                [
                    line[0].ljust(widths[0]),
                    *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
                ]
            )
            for line in lines
        )
        return "\n".join([self.title, *body])


def _text(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:.3g}" if abs(figure) < 100 else f"{figure:.0f}"
