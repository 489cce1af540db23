"""Every token's bytes, so that a stream is decoded without asking the process that holds the tokenizer. No state.

That is exact for the two usual decoders of the tokenizers library: ByteLevel (GPT-2's: Radford et al. 2019), where a
text is the bytes of its tokens, and byte fallback (SentencePiece: Kudo and Richardson 2018, arXiv 1808.06226), where
some tokens stand for one byte and the others for text. Other tokenizers have no table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

MAX_TABLE_TOKENS = 2**20
"""Four times the largest vocabularies."""

MAX_TABLE_BYTES = 16 * 2**20
"""Ten times what the largest vocabularies take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """`data[bounds[i]:bounds[i + 1]]` are token i's bytes; a decoded text leaves `special` ones out.

    `single`: with byte fallback, the tokens that stand for one byte, else None. `strips_first`: a text's first space is
    dropped.
    """

    data: bytes
    bounds: tuple[int, ...]
    special: frozenset[int]
    single: frozenset[int] | None = None
    strips_first: bool = False

    def token_bytes(self, token_id: int) -> bytes:
        """Nothing for an id that is no token."""
        if not 0 <= token_id < len(self.bounds) - 1:
            return b""
        return self.data[self.bounds[token_id] : self.bounds[token_id + 1]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """As the tokenizer decodes them, without special ones."""
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


def table_from_json(told: Any) -> TokenTable:
    """Raises ValueError, TypeError or KeyError for what is no table within the bounds."""
    data, lengths = told["data"].encode("latin-1"), _ids(told["lengths"], MAX_TABLE_BYTES)
    if len(lengths) > MAX_TABLE_TOKENS or len(data) > MAX_TABLE_BYTES or sum(lengths) != len(data):
        raise ValueError("the table of tokens has another size than it says")
    single = told["single"]
    return TokenTable(
        data=data,
        bounds=(0, *accumulate(lengths)),
        special=frozenset(_ids(told["special"], len(lengths))),
        single=None if single is None else frozenset(_ids(single, len(lengths))),
        strips_first=told["strips_first"] is True,
    )


def _ids(values: Any, limit: int) -> list[int]:
    if not (isinstance(values, list) and all(type(value) is int and 0 <= value < limit for value in values)):
        raise ValueError("the table of tokens has numbers that are none")
    return values


def _characters(run: bytes) -> str:
    """Bytes that are no text are shown as U+FFFD, each of them."""
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(run)
