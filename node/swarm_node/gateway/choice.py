"""One choice of an answer: from the tokens of a generation to what a client is shown of it, piece by piece. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from swarm_node.gateway.backend import Token
from swarm_node.gateway.tool_calls import ToolCall, ToolCallFinder


@dataclass(frozen=True, slots=True)
class Entry:
    """A token with its probability, `offset` characters into the text of its choice."""

    token: Token
    offset: int

    @property
    def text(self) -> str:
        return as_text(self.token.data)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is shown next: some text or a call, and the tokens that it came from where probabilities are wanted."""

    text: str = ""
    call: ToolCall | None = None
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A choice that is complete."""

    text: str
    calls: tuple[ToolCall, ...]
    entries: tuple[Entry, ...]
    finish_reason: str


@dataclass(slots=True)
class Choice:
    """Owned by the task that answers the request. `tools`: the names whose calls are looked for."""

    tools: Collection[str] = ()
    num_tokens: int = 0
    _reason: str = "stop"
    _num_chars: int = 0
    _pending: list[Token] = field(default_factory=list)
    _finder: ToolCallFinder | None = field(init=False)

    def __post_init__(self) -> None:
        self._finder = ToolCallFinder(self.tools) if self.tools else None

    def push(self, token: Token) -> list[Piece]:
        """What this token makes visible. With the last one that is all that is left."""
        self.num_tokens += 1
        if token.logprob is not None:
            self._pending.append(token)
        if self._finder:
            parts = self._finder.push(token.text)
            if token.finish_reason:
                parts += self._finder.flush(is_cut=token.finish_reason == "length")
        else:
            parts = [token.text] if token.text else []
        pieces = [self._piece(part) for part in parts]
        if token.finish_reason:
            self._reason = token.finish_reason
            # tokens that end an answer without a text of their own spell a stop string, which is not shown
            if self._pending and token.finish_reason == "length":
                pieces.append(self._piece(""))
        return pieces

    @property
    def finish_reason(self) -> str:
        """Of a choice whose last token has come."""
        return "tool_calls" if self._reason == "stop" and self._finder and self._finder.num_found else self._reason

    def whole(self, pieces: list[Piece]) -> Whole:
        """All of its pieces together."""
        return Whole(
            text="".join(piece.text for piece in pieces),
            calls=tuple(piece.call for piece in pieces if piece.call),
            entries=tuple(entry for piece in pieces for entry in piece.entries),
            finish_reason=self.finish_reason,
        )

    def _piece(self, part: str | ToolCall) -> Piece:
        offset, entries = self._num_chars, []
        for token in self._pending:
            entries.append(Entry(token, offset))
            offset += sum(byte & 0xC0 != 0x80 for byte in token.data)  # characters that begin here, in UTF-8
        self._pending.clear()
        if isinstance(part, ToolCall):
            return Piece(call=part, entries=tuple(entries))
        self._num_chars += len(part)
        return Piece(text=part, entries=tuple(entries))


def as_text(data: bytes) -> str:
    return data.decode(errors="replace")
