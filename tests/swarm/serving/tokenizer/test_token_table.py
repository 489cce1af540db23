"""The bytes of tokens, for tokenizers that write bytes in one of the usual forms and for others."""

from __future__ import annotations

import pytest
from swarm.serving.tokenizer.token_table import token_bytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def _byte_level(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _with_fallback(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("text", ["a", " é", "\U0001f600", "\n"])
def test_byte_level_tokens_joined_are_the_bytes_of_the_text(text: str) -> None:
    characters = [character for character, _ in sorted(_alphabet().items(), key=lambda item: item[1])]
    tokenizer = _byte_level({character: number for number, character in enumerate(characters)})
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert b"".join(token_bytes(tokenizer, token_id) for token_id in ids) == text.encode()


def _alphabet() -> dict[str, int]:
    return {character: ord(character) for character in pre_tokenizers.ByteLevel.alphabet()}


def test_fallback_tokens_are_their_byte_and_a_word_s_token_has_its_space() -> None:
    tokenizer = _with_fallback({"<0xE2>": 0, "\u2581the": 1, "end": 2})
    assert [token_bytes(tokenizer, token_id) for token_id in range(3)] == [b"\xe2", b" the", b"end"]


def test_token_that_the_vocabulary_lacks_has_no_bytes() -> None:
    assert token_bytes(_byte_level({"a": 0}), 5) == b""
