"""From token ids to text that can be shown at once: never half a character, never past a stop string."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

MAX_HELD_TOKENS = 16
"""A character takes at most four bytes, and so four tokens. Bytes that form none by then are shown as U+FFFD."""


class Detokenizer:
    """The pieces that `push` and `flush` return, joined, are the decoded whole.

    That is void for a tokenizer whose earlier text changes with later tokens, other than an unfinished character, and
    for text of more than MAX_HELD_TOKENS invalid tokens in a row.
    """

    def __init__(self, decode: Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[str]]]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        # ids before `_shown` are out as text; those from `_context` on are decoded again with each new one, for a
        # tokenizer may write a word differently at the start of a text
        self._context = 0
        self._shown = 0

    async def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = await self._pending()
        if text.endswith("\ufffd") and len(self._ids) - self._shown < MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    async def flush(self) -> str:
        return self._show(await self._pending())

    async def _pending(self) -> str:
        before, text = await self._decode([self._ids[self._context : self._shown], self._ids[self._context :]])
        return text[len(before) :]

    def _show(self, text: str) -> str:
        if text:
            self._ids = self._ids[self._shown :]
            self._context = 0
            self._shown = len(self._ids)
        elif len(self._ids) - self._shown >= MAX_HELD_TOKENS:
            del self._ids[self._shown :]  # tokens without text, such as special ones
        return text


class StopFinder:
    """Holds back text that may be the beginning of a stop string. Those of `shown_stops` end the text they stop."""

    def __init__(self, stops: Sequence[str], shown_stops: Sequence[str] = ()) -> None:
        self.has_stopped = False
        self._num_shown = dict.fromkeys(stops, 0) | {stop: len(stop) for stop in shown_stops}
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can be shown. Once a stop string has come, `has_stopped` is set and the rest is dropped."""
        if self.has_stopped:
            return ""
        self._held += text
        found = [(at, num) for stop, num in self._num_shown.items() if (at := self._held.find(stop)) >= 0]
        if found:
            self.has_stopped = True
            shown, self._held = self._held[: sum(min(found))], ""
            return shown
        num_held = max((_overlap(self._held, stop) for stop in self._num_shown), default=0)
        cut = len(self._held) - num_held
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
