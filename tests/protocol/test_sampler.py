"""Settings of every draw of a session."""

from __future__ import annotations

import pytest
from swarm_protocol.sampler import Grammar


def test_grammar_of_an_unknown_kind_is_told_the_kinds_and_how_a_regular_expression_is_written() -> None:
    with pytest.raises(ValueError, match=r"kind is none of json_schema, lark; a regular expression .* start: /"):
        Grammar(kind="regex", text="[a-z]+")
