"""One choice of an answer: from the tokens of a generation to what a client is shown of it, step by step. Pure.

Tool calls in the text are found, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: what the templates of Hermes
(Teknium et al. 2024, arXiv 2408.11857) and Qwen teach. Other forms, a tool that was not offered, broken JSON and a call
that does not end stay what they are: text. A call that the limit of tokens cuts is not shown.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
from codecs import getincrementaldecoder
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from swarm.client import Token

from swarm_node.gateway import http_limits

_new_decoder = getincrementaldecoder("utf-8")

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
MAX_HELD_SPACES = 64
_ESCAPED = re.compile(r"\\.")

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """`arguments` is JSON text; `index` counts the calls of an answer."""

    id: str
    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its probability, `offset` characters into the text of its choice."""

    token: Token
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Holds what is shown next: some text or a call, and the tokens that it came from where probabilities are
    wanted."""

    text: str = ""
    call: ToolCall | None = None
    tokens: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedChoice:
    """One whole choice: its text, the tool calls in it, its tokens, and why it ended."""

    text: str
    calls: tuple[ToolCall, ...]
    tokens: tuple[ScoredToken, ...]
    finish_reason: FinishReason


@dataclass(slots=True)
class Choice:
    """The state of one choice, owned by the task that answers the request.

    `tools` are the names of the tools whose calls are looked for.
    """

    tools: Collection[str] = ()
    num_tokens: int = 0
    _reason: FinishReason = "stop"
    _num_chars: int = 0
    _pending: list[Token] = field(default_factory=list)
    _finder: ToolCallFinder | None = field(init=False)

    def __post_init__(self) -> None:
        self._finder = ToolCallFinder(self.tools) if self.tools else None

    def push(self, token: Token) -> list[Delta]:
        """Return what this token makes visible. With the last one that is all that is left."""
        self.num_tokens += 1
        if token.logprob is not None:
            self._pending.append(token)
        if self._finder:
            parts = self._finder.push(token.text)
            if token.finish_reason:
                parts += self._finder.flush(is_cut=token.finish_reason == "length")
        else:
            parts = [token.text] if token.text else []
        deltas = [self._delta(part) for part in parts]
        if token.finish_reason:
            self._reason = token.finish_reason
            # tokens that end an answer without a text of their own spell a stop string, which is not shown
            if self._pending and token.finish_reason == "length":
                deltas.append(self._delta(""))
        return deltas

    @property
    def finish_reason(self) -> FinishReason:
        """The finish reason; valid once the last token has come."""
        return "tool_calls" if self._reason == "stop" and self._finder and self._finder.num_found else self._reason

    def finished(self, deltas: list[Delta]) -> FinishedChoice:
        """Put all of the choice's deltas together."""
        return FinishedChoice(
            text="".join(delta.text for delta in deltas),
            calls=tuple(delta.call for delta in deltas if delta.call),
            tokens=tuple(scored for delta in deltas for scored in delta.tokens),
            finish_reason=self.finish_reason,
        )

    def _delta(self, part: str | ToolCall) -> Delta:
        offset, decoder, tokens = self._num_chars, _new_decoder("replace"), list[ScoredToken]()
        if isinstance(part, str):
            self._num_chars += len(part)
        for token in self._pending:
            is_within, _ = decoder.getstate()  # the bytes of a character that has begun
            tokens.append(ScoredToken(token, min(offset + bool(is_within), self._num_chars)))
            offset += len(decoder.decode(token.data))
        self._pending.clear()
        if isinstance(part, ToolCall):
            return Delta(call=part, tokens=tuple(tokens))
        return Delta(text=part, tokens=tuple(tokens))


def as_text(data: bytes) -> str:
    return data.decode(errors="replace")


class ToolCallFinder:
    """Divides text that comes in pieces into plain text and calls. White space before a call belongs to it."""

    def __init__(self, names: Collection[str]) -> None:
        self.num_found = 0
        self._names = names
        self._held = ""
        self._num_searched = 0  # characters of the call that is held, to the end of the last CLOSING in a string
        self._num_quotes = 0  # in these

    def push(self, text: str) -> list[str | ToolCall]:
        """Return what has become certain. Text that may begin a call is held back, up to MAX_TOOL_CALL_CHARS of it."""
        self._held += text
        found: list[str | ToolCall] = []
        while (start := self._held.find(OPENING)) >= 0:
            end = self._closing(start + len(OPENING))
            if end < 0:
                break
            call = self._parse(self._held[start + len(OPENING) : end])
            shown = self._cut(end + len(CLOSING))
            shown = shown[:start].rstrip() if call else shown
            found += [part for part in (shown, call) if part]
        if start < 0:
            shown = self._cut(len(self._held) - _num_undecided(self._held))
        elif len(self._held) - start > http_limits.MAX_TOOL_CALL_CHARS:
            shown = self._cut(len(self._held))
            self._num_searched = self._num_quotes = 0
        else:
            shown = self._cut(len(self._held[:start].rstrip()))
        return [*found, shown] if shown else found

    def flush(self, *, is_cut: bool) -> list[str | ToolCall]:
        """Return what is still held, as text. White space alone after a call is dropped.

        `is_cut`: the limit of tokens ended the text. A call or a tag that has begun then is dropped.
        """
        held = self._cut(len(self._held))
        if is_cut:
            start = held.find(OPENING)
            shown = held[: start if start >= 0 else len(held) - _num_begun(held)]
            held = held if shown == held else shown.rstrip()
        return [held] if held.strip() or (held and not self.num_found) else []

    def _closing(self, begin: int) -> int:
        """Return where the call whose JSON begins at `begin` is closed, or -1. Within a string nothing closes it.

        The quotes of a held call are counted once: else each token of a long one would cost milliseconds.
        """
        while (end := self._held.find(CLOSING, begin + self._num_searched)) >= 0:
            self._num_quotes += _ESCAPED.sub("", self._held[begin + self._num_searched : end]).count('"')
            if self._num_quotes % 2 == 0:
                self._num_searched = self._num_quotes = 0
                return end
            self._num_searched = end + len(CLOSING) - begin
        return -1

    def _cut(self, length: int) -> str:
        cut, self._held = self._held[:length], self._held[length:]
        return cut

    def _parse(self, body: str) -> ToolCall | None:
        try:
            call = json.loads(body, parse_float=_number, parse_int=_number)
            name, arguments = call["name"], call["arguments"]
            # an escape may spell half a surrogate pair, which no response can hold
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        self.num_found += 1
        return ToolCall(id=f"call_{secrets.token_hex(12)}", index=self.num_found - 1, name=name, arguments=text)


def _number(text: str) -> float:
    """Read a number of JSON, whose grammar, and so a call that was forced, has larger ones than Python reads."""
    try:
        return int(text)
    except ValueError:  # not a whole one, or of thousands of digits
        number = float(text)
    return number if math.isfinite(number) else math.copysign(sys.float_info.max, number)


def _num_undecided(text: str) -> int:
    """Count the characters at the end that a call may begin with: white space, and the beginning of OPENING."""
    begun = _num_begun(text)
    rest = text[: len(text) - begun][-MAX_HELD_SPACES:]
    return begun + len(rest) - len(rest.rstrip())


def _num_begun(text: str) -> int:
    """Count the characters at the end that are the beginning of OPENING."""
    return next((n for n in range(len(OPENING) - 1, 0, -1) if text.endswith(OPENING[:n])), 0)
