"""Tries out every family of transformers' causal language models, and compares the results with
docs/reference/models.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.served_families import families, judged, page

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


def test_models_page_has_the_results_of_each_family() -> None:
    assert (DOCS / "reference" / "models.md").read_text() == page([judged(family) for family in families()])
