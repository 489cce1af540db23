"""Where an answer ends: end tokens, stop tokens and strings, and what holds them off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Grammar

HALVES = [(0, 3), (3, 6)]


def test_stop_token_ends_the_answer_and_is_not_shown(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            expected = box.expected()
            tokens = [token async for token in box.generate(stop_token_ids=[expected[4]])]
            assert [token.token_id for token in tokens] == expected[:5]
            assert tokens[-1].finish_reason == "stop"
            assert "".join(token.text for token in tokens) == await (await box.kit()).decode(expected[:4])

    virtual_time.run(scenario())


def test_ignore_eos_goes_on_after_the_models_end_token_and_not_after_a_stop_token(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            expected = box.expected()
            object.__setattr__(await box.kit(), "end_ids", frozenset({expected[4]}))
            assert await box.tokens() == expected[:5]
            assert await box.tokens(ignore_eos=True) == expected
            assert await box.tokens(ignore_eos=True, stop_token_ids=[expected[2]]) == expected[:3]

    virtual_time.run(scenario())


def test_stop_string_among_the_first_min_tokens_is_text(boxes: Any, llama_dir: Path, tokenize: Any) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            # of two tokens that come in turns
            turns = {"logit_bias": dict.fromkeys(tokenize("xy"), 100.0), "frequency_penalty": 2.0}
            texts = [token.text async for token in box.generate(40, **turns)]
            assert {"x", "y"} == set(texts[:20]) == set(texts[20:])
            again = texts.index("x", 20)
            tokens = [token async for token in box.generate(40, stop="x", min_tokens=20, **turns)]
            assert [token.text for token in tokens] == [*texts[:again], ""]
            assert tokens[-1].finish_reason == "stop"

    virtual_time.run(scenario())


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"stop_token_ids": [100_000]}, "has no token 100000"),
        ({"logit_bias": {100_000: 1.0}}, "has no token 100000"),
        ({"grammar": Grammar(kind="json_schema", text="{}"), "stop_token_ids": ()}, "has no end token"),
    ],
    ids=str,
)
def test_tokens_that_the_model_does_not_have_are_refused_and_nobody_is_blamed(
    boxes: Any, llama_dir: Path, asked: dict[str, Any], why: str
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            object.__setattr__(await box.kit(), "end_ids", frozenset())
            with pytest.raises(ConfigError, match=why):
                await box.tokens(**asked)
            assert not box.client._state.health.avoid
            assert await box.tokens() == box.expected()

    virtual_time.run(scenario())


def test_answer_may_end_right_after_min_tokens(boxes: Any, llama_dir: Path, tokenize: Any) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            [likeliest] = tokenize("x")
            asked = {"logit_bias": {likeliest: 100.0}, "stop_token_ids": [likeliest]}
            assert await box.tokens(**asked) == [likeliest]
            tokens = await box.tokens(min_tokens=5, **asked)
            assert tokens.index(likeliest) == len(tokens) - 1 == 5

    virtual_time.run(scenario())
