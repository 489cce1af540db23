"""SECURITY.md says whether each attempt is stopped, bounded or detected, and names tests that exist."""

from __future__ import annotations

import re
from functools import cache

from support.site_pages import ROOT

TEXT = (ROOT / "SECURITY.md").read_text("utf-8")
TABLE = TEXT.partition("## What a peer can do, and what stops it")[2].partition("\n## ")[0]
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| attempt |")]
VERDICTS = ("stopped", "stopped, not by default", "bounded", "detected", "detected, not by default")


@cache
def existing() -> frozenset[str]:
    """Return the names of all tests, and of the files that they are in."""
    names = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        names |= {path.stem, path.relative_to(ROOT).as_posix()}
        names |= set(re.findall(r"^ *(?:async )?def (test_\w+)\(", path.read_text("utf-8"), flags=re.MULTILINE))
    return frozenset(names)


def test_security_rows_have_a_verdict_and_name_a_test() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        _, attempt, verdict, what, _ = row.split(" | " if row.count(" | ") > 3 else "|", 4)
        assert verdict.strip() in VERDICTS, attempt
        assert re.search(r"\btest_\w+", what), f"{attempt} names no test"


def test_security_names_tests_that_exist() -> None:
    named = set(re.findall(r"tests/[\w/]+\.py", TEXT)) | set(re.findall(r"(?<![\w/])test_\w+", TEXT))
    assert len(named) > 80
    assert named - existing() == set()
