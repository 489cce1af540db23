"""Tool calls in a model's text, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: finding and enforcing them.

This is what the templates of Hermes (Teknium et al. 2024, arXiv 2408.11857) and Qwen teach. Other forms, a tool that
was not offered, broken JSON and a call that does not end stay what they are: text. A call that the limit of tokens
cuts is not shown. `calls_grammar` is the grammar of answers that have to call tools, or whose calls have to fit:
llguidance's Lark with JSON schemas. Pure.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Grammar

from swarm_node.gateway import http_limits

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
MAX_HELD_SPACES = 64
_ESCAPED = re.compile(r"\\.")

Schema = Mapping[str, Any]
OPENED = json.dumps(OPENING)
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The style of JSON that most models write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """`arguments` is JSON text; `index` counts the calls of an answer."""

    id: str
    index: int
    name: str
    arguments: str


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """`arguments` is the JSON schema of what the tool is called with."""

    name: str
    arguments: Schema


def calls_grammar(
    tools: Sequence[CallableTool], *, may_talk: bool, may_repeat: bool, answer: Schema | None = None
) -> Grammar:
    """Return the grammar of answers that call one of `tools`, or with `may_repeat` several.

    With `may_talk` there may be text before and between calls, or none of these; with `answer` instead a JSON text of
    that schema. After a call that is the only one the answer ends. Raises ConfigError if the schemas are too large.
    """
    if answer is None and may_talk:
        start = "(opened call)* TEXT" if may_repeat else "TEXT | opened call"
        # lazy: text ends where a call begins, and not where it could no longer go on
        rules = [
            f"start: {start}",
            f"opened[lazy]: /(?s:.*)/ {OPENED}",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*{OPENING}.*)/",
        ]
    else:
        calls = f"{OPENED} call" + (f' ("\\n" {OPENED} call)*' if may_repeat else "")
        rules = [f"start: {calls}{' | answer' if may_talk else ''}"]
    if answer is not None:
        rules.append(f"answer: %json {_styled(answer)}")
    rules.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
    for index, tool in enumerate(tools):
        head = json.dumps(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
        rules.append(f"call_{index}: {head} arguments_{index} {json.dumps('}' + chr(10) + CLOSING)}")
        rules.append(f"arguments_{index}: %json {_styled(tool.arguments)}")
    try:
        return Grammar(kind="lark", text="\n".join(rules))
    except ValueError as error:
        raise ConfigError(f"the tools cannot be kept to: {error}", remedy="offer fewer tools") from None


def _styled(schema: Schema) -> str:
    try:
        return json.dumps({**schema, "x-guidance": STYLE})
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"a JSON schema cannot be used: {error}", remedy="use another one") from None
