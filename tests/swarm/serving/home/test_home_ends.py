"""A client that keeps text at home on a simulated internet: the same tokens, and what servers are told meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.leaks import no_leaks
from swarm.testing import virtual_time

HALVES = [(0, 3), (3, 6)]


def test_tokens_are_those_of_ordinary_serving(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, text_at_home={"tiny": llama_dir}) as box:
            generation = box.generate()
            assert [token.token_id async for token in generation] == box.expected()
            print(generation.trace())
            await box.all_freed()

    with no_leaks():
        virtual_time.run(scenario())
