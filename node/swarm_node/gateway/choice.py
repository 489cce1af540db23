"""One choice of an answer: turns the tokens of a generation into what the client is shown, step by step. Pure.

Tool calls are recognized in the text in the form `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, which the
templates of Hermes (Teknium et al. 2024, arXiv 2408.11857) and Qwen teach. Other forms, a tool that was not offered,
broken JSON and a call without an end remain text. A call that the token limit cuts off is not shown. `calls_grammar`
makes the grammar of answers that must call a tool, or whose calls must fit a schema.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
from codecs import getincrementaldecoder
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from swarm.client import Token
from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Grammar

from swarm_node.gateway import http_limits

_new_decoder = getincrementaldecoder("utf-8")

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
_OPENED = json.dumps(OPENING)
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The JSON style that most models write."""
MAX_HELD_SPACES = 64
_ESCAPED = re.compile(r"\\.")

Schema = Mapping[str, Any]
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made. `arguments` is JSON text. `index` counts the calls of an answer."""

    id: str
    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its probability. It begins `offset` characters into the text of its choice."""

    token: Token
    offset: int

    @property
    def is_scored(self) -> bool:
        """Tell whether the token has a probability. The first one of an echoed prompt has none."""
        return self.token.logprob is not None


@dataclass(frozen=True, slots=True)
class Delta:
    """Text or a call to show next. If probabilities are wanted, `tokens` has the tokens that it came from."""

    text: str = ""
    call: ToolCall | None = None
    tokens: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedChoice:
    """One whole choice: its text, its tool calls, its tokens, and why it ended."""

    text: str
    calls: tuple[ToolCall, ...]
    tokens: tuple[ScoredToken, ...]
    finish_reason: FinishReason


@dataclass(slots=True)
class Choice:
    """The state of one choice, owned by the task that answers the request.

    `tools` are the names of the tools whose calls are recognized. If the prompt is echoed (`echoes`), its tokens come
    first, and the choice lists all drawn tokens: readers find the prompt's by counting from the end, too.
    """

    tools: Collection[str] = ()
    echoes: bool = False
    num_tokens: int = 0
    _reason: FinishReason = "stop"
    _num_chars: int = 0
    _pending: list[Token] = field(default_factory=list)
    _finder: ToolCallFinder | None = field(init=False)

    def __post_init__(self) -> None:
        self._finder = ToolCallFinder(self.tools) if self.tools else None

    def push(self, token: Token) -> list[Delta]:
        """Return what this token makes visible. The last token makes all of the remaining text visible."""
        self.num_tokens += token.is_drawn
        if token.logprob is not None or token.is_prompt:
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
            # a last token without text of its own belongs to a stop string, which is not shown
            if self._pending and (token.finish_reason == "length" or self.echoes):
                deltas.append(self._delta(""))
        return deltas

    @property
    def finish_reason(self) -> FinishReason:
        """The finish reason. Valid once the last token was pushed."""
        return "tool_calls" if self._reason == "stop" and self._finder and self._finder.num_found else self._reason

    def finished(self, deltas: list[Delta]) -> FinishedChoice:
        """Combine all of the choice's deltas."""
        return FinishedChoice(
            text="".join(delta.text for delta in deltas),
            calls=tuple(delta.call for delta in deltas if delta.call),
            tokens=tuple(scored for delta in deltas for scored in delta.tokens),
            finish_reason=self.finish_reason,
        )

    def _delta(self, part: str | ToolCall) -> Delta:
        begin, decoder, tokens = self._num_chars, _new_decoder("replace"), list[ScoredToken]()
        offset = begin - self._num_unshown(part)
        if isinstance(part, str):
            self._num_chars += len(part)
        for token in self._pending:
            is_within, _ = decoder.getstate()  # bytes of an incomplete character
            tokens.append(ScoredToken(token, min(max(begin, offset + bool(is_within)), self._num_chars)))
            offset += len(decoder.decode(token.data))
        self._pending.clear()
        if isinstance(part, ToolCall):
            return Delta(call=part, tokens=tuple(tokens))
        return Delta(text=part, tokens=tuple(tokens))

    def _num_unshown(self, part: str | ToolCall) -> int:
        """Return how many characters of a prompt's tokens come before its text, such as those of a special token, or
        the space with which some tokenizers begin."""
        if not (self._pending and self._pending[0].is_prompt and isinstance(part, str)):
            return 0
        return max(0, as_text(b"".join(token.data for token in self._pending)).find(part))


def as_text(data: bytes) -> str:
    return data.decode(errors="replace")


class ToolCallFinder:
    """Divides text that arrives in pieces into plain text and calls. White space before a call is dropped."""

    def __init__(self, names: Collection[str]) -> None:
        self.num_found = 0
        self._names = names
        self._held = ""
        # characters of the held call that were searched, up to the end of the last CLOSING inside a string
        self._num_searched = 0
        self._num_quotes = 0  # quotes in those characters

    def push(self, text: str) -> list[str | ToolCall]:
        """Return the parts that are certain. Text that may begin a call is held back, up to MAX_TOOL_CALL_CHARS."""
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
        """Return the held text. If it is only white space after a call, it is dropped.

        `is_cut` means that the token limit ended the text: an unfinished call or tag is then dropped.
        """
        held = self._cut(len(self._held))
        if is_cut:
            start = held.find(OPENING)
            shown = held[: start if start >= 0 else len(held) - _num_begun(held)]
            held = held if shown == held else shown.rstrip()
        return [held] if held.strip() or (held and not self.num_found) else []

    def _closing(self, begin: int) -> int:
        """Return where the call whose JSON begins at `begin` is closed, or -1. CLOSING inside a string does not close
        it.

        The quotes of a held call are counted only once: otherwise each token of a long call would cost milliseconds.
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
            # an escape may encode an unpaired surrogate, which no response can hold
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        self.num_found += 1
        return ToolCall(id=f"call_{secrets.token_hex(12)}", index=self.num_found - 1, name=name, arguments=text)


def _number(text: str) -> float:
    """Read a JSON number. JSON's grammar, and thus a forced call, allows larger numbers than Python reads."""
    try:
        return int(text)
    except ValueError:  # not an integer, or one of thousands of digits
        number = float(text)
    return number if math.isfinite(number) else math.copysign(sys.float_info.max, number)


def _num_undecided(text: str) -> int:
    """Count the characters at the end that may belong to a call: white space, and the beginning of OPENING."""
    begun = _num_begun(text)
    rest = text[: len(text) - begun][-MAX_HELD_SPACES:]
    return begun + len(rest) - len(rest.rstrip())


def _num_begun(text: str) -> int:
    """Count the characters at the end that are the beginning of OPENING."""
    return next((n for n in range(len(OPENING) - 1, 0, -1) if text.endswith(OPENING[:n])), 0)


def calls_grammar(
    tools: Mapping[str, Schema], *, may_talk: bool, may_repeat: bool, answer: Schema | None = None
) -> Grammar:
    """Return the grammar, in llguidance's Lark with JSON schemas, of answers that call one of `tools`.

    `tools` maps each tool to the schema of its arguments. `may_repeat` allows several calls. `may_talk` allows text
    before and between calls, or text alone. With `answer`, the alternative to a call is a JSON text of that schema
    instead. If only one call is allowed, the answer ends after it. Raises ConfigError if the schemas are too large.
    """
    if answer is None and may_talk:
        start = "(opened call)* TEXT" if may_repeat else "TEXT | opened call"
        # lazy: text ends where a call begins, not where it could no longer go on
        rules = [
            f"start: {start}",
            f"opened[lazy]: /(?s:.*)/ {_OPENED}",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*{OPENING}.*)/",
        ]
    else:
        calls = f"{_OPENED} call" + (f' ("\\n" {_OPENED} call)*' if may_repeat else "")
        rules = [f"start: {calls}{' | answer' if may_talk else ''}"]
    if answer is not None:
        rules.append(f"answer: %json {_styled(answer)}")
    rules.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
    for index, (name, arguments) in enumerate(tools.items()):
        head = json.dumps(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f"call_{index}: {head} arguments_{index} {json.dumps('}' + chr(10) + CLOSING)}")
        rules.append(f"arguments_{index}: %json {_styled(arguments)}")
    try:
        return Grammar(kind="lark", text="\n".join(rules))
    except ValueError as error:
        raise ConfigError(f"the tools cannot be made a grammar: {error}", remedy="offer fewer tools") from None


def _styled(schema: Schema) -> str:
    try:
        return json.dumps({**schema, "x-guidance": STYLE})
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"a JSON schema cannot be used: {error}", remedy="use another one") from None
