"""Settings of every draw of a session."""

from __future__ import annotations

import pytest
from swarm_protocol.sampler import Grammar


def test_grammar_of_an_unknown_kind_is_refused_with_the_known_kinds() -> None:
    with pytest.raises(ValueError, match=r"kind is none of json_schema, lark; a regular expression .* start: /"):
        Grammar(kind="regex", text="[a-z]+")
