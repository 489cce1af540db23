"""The bytes that one token stands for, which may be a part of a character.

Tokenizers with a byte-level alphabet (GPT-2's: Radford et al. 2019) write each byte as a printable character of its
own; those with byte fallback (SentencePiece: Kudo and Richardson 2018, arXiv 1808.06226) as `<0xE2>`. Of any other
token the bytes are those of its text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

SPACE = "\u2581"
"""As SentencePiece writes a space."""

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """Of transformers' `tokenizer`. A space at the start of a word belongs to its token."""
    written = tokenizer.convert_ids_to_tokens(token_id)
    if isinstance(written, str):
        if byte := fallback_byte(written):
            return byte
        if _is_byte_level(tokenizer) and (data := byte_level_bytes(written)) is not None:
            return data
        if written.startswith(SPACE):  # decoding would drop it from a text's beginning
            return written.replace(SPACE, " ").encode()
    text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    return text.encode(errors="replace")


def fallback_byte(written: str) -> bytes | None:
    """The byte that `<0xE2>` stands for; None for another token."""
    match = _FALLBACK.fullmatch(written)
    return bytes([int(match[1], 16)]) if match else None


def byte_level_bytes(written: str) -> bytes | None:
    """What a token in the byte-level alphabet stands for; None for one that is not written in it."""
    bytes_by_character = _bytes_by_character()
    try:
        return bytes([bytes_by_character[character] for character in written])
    except KeyError:
        return None


@functools.lru_cache(maxsize=8)
def _is_byte_level(tokenizer: Any) -> bool:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return False
    decoder = json.loads(decoder.__getstate__())
    return any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ())))


@functools.cache
def _bytes_by_character() -> Mapping[str, int]:
    """Printable Latin-1 characters stand for themselves, the other bytes for the characters from 256 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
