"""Finds calls of tools in a model's text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

This is what the templates of Hermes (Teknium et al. 2024, arXiv 2408.11857) and Qwen teach. Other forms, a tool that
was not offered, broken JSON and a call that does not end stay what they are: text. A call that the limit of tokens cuts
is not shown.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from swarm_node.gateway import http_limits

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
MAX_HELD_SPACES = 64
_ESCAPED = re.compile(r"\\.")


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

    def push(self, text: str) -> list[str | ToolCall]:
        """What has become certain; text that may begin a call is held back, up to MAX_TOOL_CALL_CHARS of it."""
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
        else:
            shown = self._cut(len(self._held[:start].rstrip()))
        return [*found, shown] if shown else found

    def flush(self, *, is_cut: bool) -> list[str | ToolCall]:
        """What is still held, and can be no call any more. White space alone after a call is nothing.

        `is_cut`: the limit of tokens ended the text. A call or a tag that has begun then is dropped.
        """
        held = self._cut(len(self._held))
        if is_cut:
            start = held.find(OPENING)
            shown = held[: start if start >= 0 else len(held) - _num_begun(held)]
            held = held if shown == held else shown.rstrip()
        return [held] if held.strip() or (held and not self.num_found) else []

    def _closing(self, begin: int) -> int:
        """Where the call whose JSON begins at `begin` is closed; -1: not yet. Within a string nothing closes it."""
        num_quotes = 0
        while (end := self._held.find(CLOSING, begin)) >= 0:
            num_quotes += _ESCAPED.sub("", self._held[begin:end]).count('"')
            if num_quotes % 2 == 0:
                return end
            begin = end + len(CLOSING)
        return -1

    def _cut(self, length: int) -> str:
        cut, self._held = self._held[:length], self._held[length:]
        return cut

    def _parse(self, body: str) -> ToolCall | None:
        try:
            call = json.loads(body)
            name, arguments = call["name"], call["arguments"]
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        self.num_found += 1
        return ToolCall(id=f"call_{secrets.token_hex(12)}", index=self.num_found - 1, name=name, arguments=text)


def _num_undecided(text: str) -> int:
    """Characters at the end that a call may begin with: white space, and the beginning of OPENING."""
    begun = _num_begun(text)
    rest = text[: len(text) - begun][-MAX_HELD_SPACES:]
    return begun + len(rest) - len(rest.rstrip())


def _num_begun(text: str) -> int:
    """Characters at the end that are the beginning of OPENING."""
    return next((n for n in range(len(OPENING) - 1, 0, -1) if text.endswith(OPENING[:n])), 0)
