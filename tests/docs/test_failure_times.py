"""The times on the page of failures equal the constants that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/failures.md"
NAMED = re.compile(
    r"`(?P<before>[A-Z_]+_S)` (?P<after_name>[\d.]+) s|(?P<before_name>[\d.]+) s \(`(?P<after>[A-Z_]+_S)`\)"
)
TIMES = [
    (match["before"] or match["after"], float(match["after_name"] or match["before_name"]))
    for match in NAMED.finditer(PAGE.read_text())
]


def values_of(name: str) -> set[float]:
    """Return the values that modules give to the constant."""
    pattern = re.compile(rf"^{name} = ([\d.]+)$", re.MULTILINE)
    sources = (path.read_text() for path in (ROOT / "swarm/swarm").rglob("*.py"))
    return {float(value) for source in sources for value in pattern.findall(source)}


def test_page_names_times() -> None:
    assert len(TIMES) >= 15


@pytest.mark.parametrize(("name", "seconds"), TIMES)
def test_failures_page_has_the_times_of_the_code(name: str, seconds: float) -> None:
    assert seconds in values_of(name)
