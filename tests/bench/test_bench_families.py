"""Every family of transformers' causal language models, tried out: docs/reference/models.md is what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.served_families import families, judged, page

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


def test_models_page_says_what_each_family_gives() -> None:
    assert (DOCS / "reference" / "models.md").read_text() == page([judged(family) for family in families()])
