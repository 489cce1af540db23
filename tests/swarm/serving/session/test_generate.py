"""Tests of where an answer ends (end tokens, stop tokens and strings, minimum length), and the text of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.serving.model.shape import ModelShape
from swarm.serving.sampling.sampling import Sampling
from swarm.serving.session.generate import MAX_HELD_TOKENS, AnswerForm, Detokenizer, StopFinder, generate
from swarm.serving.session.trace import Trace
from swarm.serving.tokenizer.model_assets import ModelAssets, TokenizerQueue
from swarm.serving.tokenizer.token_table import table_of
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Grammar
from swarm_protocol.session_frames import SampledToken, TokenDraw
from tokenizers import Tokenizer, decoders, models

HALVES = [(0, 3), (3, 6)]


def test_stop_token_ends_the_answer_and_is_not_returned(boxes: Any, llama_dir: Path) -> None:
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
            # two tokens that alternate
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
def test_tokens_outside_the_vocabulary_are_refused_and_no_server_is_blamed(
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


# Bytes as tokens, with U+FFFD for an incomplete character, as byte-level tokenizers decode them.
BROKEN = "\ufffd"


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def each(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], *, flush: bool = False) -> list[str]:
    """Return the text that a detokenizer returns with each token."""

    async def decode_all(sequences: Sequence[Sequence[int]]) -> list[str]:
        return [decode(ids) for ids in sequences]

    async def scenario() -> list[str]:
        detokenizer = Detokenizer(decode_all)
        shown = [await detokenizer.push(token_id) for token_id in token_ids]
        return [*shown, await detokenizer.flush()] if flush else shown

    return asyncio.run(scenario())


def pieces(data: bytes) -> list[str]:
    return each(decode_bytes, data, flush=True)


@given(st.text())
def test_detokenizer_returns_any_text_whole_and_never_a_part_of_a_character(text: str) -> None:
    shown = pieces(text.encode())
    assert "".join(shown) == text
    assert not any(BROKEN in piece for piece in shown) or BROKEN in text


@given(st.text(min_size=1))
def test_detokenizer_returns_each_character_with_its_last_byte(text: str) -> None:
    shown = pieces(text.encode())
    at = 0
    for character in text:
        at += len(character.encode())
        if BROKEN not in text:
            assert shown[at - 1] == character


@given(st.binary(max_size=MAX_HELD_TOKENS - 1))
def test_detokenizer_invalid_bytes_join_to_the_decoded_whole(data: bytes) -> None:
    assert "".join(pieces(data)) == decode_bytes(data)


def test_detokenizer_flushes_half_a_character_at_the_end() -> None:
    assert pieces("é".encode()[:1]) == ["", BROKEN]


def test_detokenizer_does_not_hold_back_endless_invalid_bytes() -> None:
    shown = pieces(b"\xff" * 100)
    assert all(len(piece) <= MAX_HELD_TOKENS for piece in shown)
    assert "".join(shown) == BROKEN * 100


def test_detokenizer_keeps_the_spaces_of_a_tokenizer_that_strips_the_first() -> None:
    """SentencePiece's decoders drop a leading space, so each piece is decoded together with the one before it."""
    vocab = {"▁a": 0, "▁b": 1, "c": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    assert each(lambda ids: tokenizer.decode(list(ids)), (0, 1, 2, 0)) == ["a", " b", "c", " a"]


# pieces of a tokenizer that drops a text's first space, with a special token and the three bytes of one character
PIECES = [b" a", b" b", b"c", b"<s>", b"\xe2", b"\x82", b"\xac"]


class Drawn:
    """Draws the tokens of " bc"."""

    async def next_tokens(
        self, _tokens: Sequence[int], _draw: TokenDraw, _num_tokens: int
    ) -> AsyncGenerator[SampledToken, None]:
        for token_id in (1, 2):
            yield SampledToken(token_id=token_id)


@pytest.mark.parametrize(
    ("prompt", "continues", "text"),
    [
        ([3, 0, 2], True, " bc"),
        ([3, 0, 2], False, "bc"),
        ([3, 0, 3], True, " bc"),
        ([3], True, "bc"),
        ([3, 4, 5, 6], True, " bc"),
        ([3, 0, 4, 5], True, "bc"),
    ],
    ids=["word", "chat", "word before a special token", "beginning", "character of bytes", "part of a character"],
)
def test_answer_that_continues_a_text_begins_with_the_space_between_them(
    prompt: list[int], continues: bool, text: str
) -> None:
    assets = ModelAssets(
        shape=ModelShape(name="tiny", revision="r", num_blocks=1, hidden_size=1, vocab_size=len(PIECES)),
        context_tokens=8,
        end_ids=frozenset(),
        sampling={},
        table=table_of(PIECES, special=[3], single=[4, 5, 6], strips_first=True),
        has_chat_template=False,
        queue=cast("TokenizerQueue", None),
    )

    async def scenario() -> str:
        form = AnswerForm(continues=continues)
        answer = generate(Drawn(), assets, prompt, Sampling(), 2, Trace(model="tiny"), form=form)
        return "".join([token.text async for token in answer])

    assert asyncio.run(scenario()) == text


def stopped(stops: Sequence[str], parts: Sequence[str]) -> tuple[list[str], bool]:
    finder = StopFinder(stops)
    shown = [finder.push(part) for part in parts]
    return [*shown, finder.flush()], finder.has_stopped


def test_stop_string_across_pieces_is_found_and_no_part_of_it_returned() -> None:
    assert stopped(["END"], ["ab", "cE", "N", "Dx", "y"]) == (["ab", "c", "", "", "", ""], True)


def test_stop_beginning_is_returned_when_the_rest_does_not_follow() -> None:
    assert stopped(["END"], ["aE", "N", "T"]) == (["a", "", "ENT", ""], False)


def test_stop_beginning_is_flushed_at_the_end() -> None:
    assert stopped(["END"], ["aEN"]) == (["a", "EN"], False)


def test_stop_ends_at_the_first_of_several_strings() -> None:
    assert stopped(["yy", "x"], ["axyy"]) == (["a", ""], True)


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_stop_returns_exactly_the_text_before_the_first_stop_for_any_pieces(parts: list[str], stops: list[str]) -> None:
    text = "".join(parts)
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    shown, has_stopped = stopped(stops, parts)
    # The text ends where a stop string is complete, although another that began earlier may be incomplete.
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    assert has_stopped == bool(found)
    if not found:
        assert "".join(shown) == text
    else:
        assert text.startswith("".join(shown))
        assert len("".join(shown)) <= min(ends)
        assert not any(stop in "".join(shown) for stop in stops)


def test_stop_string_ends_the_text_when_it_is_returned() -> None:
    finder = StopFinder(["no"], ["</call>"])
    assert [finder.push(part) for part in ("a</ca", "ll>b", "c")] == ["a", "</call>", ""]
    assert finder.has_stopped
    assert StopFinder(["</call>"], ["</ca"]).push("a</call>") == "a", (
        "of two that begin together, the one that shows less counts"
    )


@pytest.mark.parametrize("stops", [[], ["zzz"]])
def test_stop_delays_no_text_without_a_match(stops: list[str]) -> None:
    assert stopped(stops, ["a", "b"]) == (["a", "b", ""], False)


def test_detokenizer_drops_tokens_without_text() -> None:
    """A model may produce only special tokens. Decoding all of them each time would take longer and longer."""
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join("word " for token_id in ids if token_id)

    assert each(decode, [1, *[0] * 1000, 1]) == ["word ", *[""] * 1000, "word "]
    assert longest <= 2 * MAX_HELD_TOKENS
