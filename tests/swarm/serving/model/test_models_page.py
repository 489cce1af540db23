"""docs/reference/models.md lists every family of transformers, and is right about those tried here. tests/bench tries
all of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.served_families import families, judged

PAGE = (Path(__file__).parents[4] / "docs" / "reference" / "models.md").read_text()
SERVED, REFUSED, UNTRIED = (
    set(re.findall(r"^\| `(.+?)` \||`([\w-]+)`(?=[,.])", part, re.M)) for part in PAGE.split("\n## ")[1:]
)


def names(found: set[tuple[str, str]]) -> set[str]:
    return {first or second for first, second in found}


def test_page_names_each_family_once() -> None:
    parts = [names(part) for part in (SERVED, REFUSED, UNTRIED)]
    assert sorted(name for part in parts for name in part) == families()


@pytest.mark.parametrize("family", ["gemma2", "glm4", "nanochat", "qwen3_moe"])
def test_page_says_of_a_family_that_it_is_served(family: str) -> None:
    assert judged(family).kind == "served"
    assert family in names(SERVED)


@pytest.mark.parametrize("family", ["llama4_text", "mamba", "xlm-roberta"])
def test_page_says_why_a_family_is_refused(family: str) -> None:
    found = judged(family)
    assert found.kind == "refused"
    assert f"| `{family}` | {found.reason[:120]} |" in PAGE
