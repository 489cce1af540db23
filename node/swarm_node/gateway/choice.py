"""One choice of an answer: from the tokens of a generation to what a client is shown of it, step by step. Pure."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from swarm.client import Token

from swarm_node.gateway.tools import ToolCall, ToolCallFinder

_new_decoder = getincrementaldecoder("utf-8")

FinishReason = Literal["stop", "length", "tool_calls"]


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
