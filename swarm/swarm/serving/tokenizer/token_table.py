"""The bytes of every token, so that a stream is decoded without the tokenizer's process.

Tokenizers with a byte-level alphabet (ByteLevel; from GPT-2, Radford et al. 2019) write each byte as one printable
character, and a text is the bytes of its tokens. Tokenizers with byte fallback (SentencePiece: Kudo and Richardson
2018, arXiv 1808.06226) write single bytes as `<0xE2>`, and all other tokens are text. The table is exact for these two
decoders of the tokenizers library; other tokenizers have none. No state.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")

MAX_TABLE_TOKENS = 2**20
"""Four times the size of the largest vocabularies."""

MAX_TABLE_BYTES = 16 * 2**20
"""Ten times the bytes of the largest vocabularies."""


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """Return the bytes of a token of transformers' `tokenizer`. A space at the start of a word belongs to its token."""
    written = tokenizer.convert_ids_to_tokens(token_id)
    if isinstance(written, str):
        if byte := fallback_byte(written):
            return byte
        if _is_byte_level(tokenizer) and (data := byte_level_bytes(written)) is not None:
            return data
        if written.startswith(SPACE):  # decoding would drop the space at the beginning of a text
            return written.replace(SPACE, " ").encode()
    text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    return text.encode(errors="replace")


def fallback_byte(written: str) -> bytes | None:
    """Return the byte of a token such as `<0xE2>`; None for another token."""
    match = _FALLBACK.fullmatch(written)
    return bytes([int(match[1], 16)]) if match else None


def byte_level_bytes(written: str) -> bytes | None:
    """Return the bytes of a token in the byte-level alphabet; None if it has another character."""
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
    """Return the byte of each character: printable Latin-1 characters are themselves, and characters from 256 the other
    bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """`data[bounds[i]:bounds[i + 1]]` are the bytes of token i. Decoded texts leave out `special` tokens.

    `single`: the tokens of single bytes, with byte fallback, else None. `strips_first`: a text's first space is
    dropped.
    """

    data: bytes
    bounds: tuple[int, ...]
    special: frozenset[int]
    single: frozenset[int] | None = None
    strips_first: bool = False

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes; empty for an id without a token."""
        if not 0 <= token_id < len(self.bounds) - 1:
            return b""
        return self.data[self.bounds[token_id] : self.bounds[token_id + 1]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode as the tokenizer does, without special tokens."""
        shown = [token_id for token_id in token_ids if token_id not in self.special]
        if self.single is None:
            return b"".join(map(self.token_bytes, shown)).decode(errors="replace")
        text = "".join(self._with_fallback(shown, self.single))
        return text[1:] if self.strips_first and text.startswith(" ") else text

    def _with_fallback(self, token_ids: Iterable[int], single: frozenset[int]) -> Iterable[str]:
        run = b""
        for token_id in token_ids:
            piece = self.token_bytes(token_id)
            if token_id in single:
                run += piece
            elif piece:
                yield _characters(run)
                run = b""
                yield piece.decode(errors="replace")
        yield _characters(run)

    def to_json(self) -> dict[str, Any]:
        lengths = [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]
        return {
            "data": self.data.decode("latin-1"),
            "lengths": lengths,
            "special": sorted(self.special),
            "single": None if self.single is None else sorted(self.single),
            "strips_first": self.strips_first,
        }


def table_of(pieces: Sequence[bytes], special: Iterable[int], single: Iterable[int] | None, **how: bool) -> TokenTable:
    return TokenTable(
        data=b"".join(pieces),
        bounds=(0, *accumulate(map(len, pieces))),
        special=frozenset(special),
        single=None if single is None else frozenset(single),
        **how,
    )


def table_from_json(reply: Any) -> TokenTable:
    """Return the table in `reply`. Raises ValueError, TypeError or KeyError if it is invalid or too large."""
    data, lengths = reply["data"].encode("latin-1"), _ids(reply["lengths"], MAX_TABLE_BYTES)
    if len(lengths) > MAX_TABLE_TOKENS or len(data) > MAX_TABLE_BYTES or sum(lengths) != len(data):
        raise ValueError("the token table has another size than it says")
    single = reply["single"]
    return TokenTable(
        data=data,
        bounds=(0, *accumulate(lengths)),
        special=frozenset(_ids(reply["special"], len(lengths))),
        single=None if single is None else frozenset(_ids(single, len(lengths))),
        strips_first=reply["strips_first"] is True,
    )


def _ids(values: Any, limit: int) -> list[int]:
    if not (isinstance(values, list) and all(type(value) is int and 0 <= value < limit for value in values)):
        raise ValueError("the token table contains invalid numbers")
    return values


def _characters(run: bytes) -> str:
    """Return the text of a run of bytes. If it is not UTF-8, each byte becomes U+FFFD."""
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(run)
