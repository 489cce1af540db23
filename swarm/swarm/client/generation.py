"""A running answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from swarm.serving.session.generate import Token
from swarm.serving.session.trace import Trace


class Generation:
    """Nothing happens before the first token is asked for; `aclose` frees the chain at any time."""

    def __init__(self, start: Callable[[Trace], AsyncGenerator[Token, None]], model: str) -> None:
        self._trace = Trace(model=model)
        self._tokens = start(self._trace)

    def __aiter__(self) -> AsyncIterator[Token]:
        return self._tokens

    async def aclose(self) -> None:
        await self._tokens.aclose()

    @property
    def num_prompt_tokens(self) -> int:
        """0 until the first token has come."""
        return self._trace.num_prompt_tokens

    def trace(self) -> dict[str, Any]:
        """What has happened so far: `hops` (servers, spans, milliseconds), `replays`, `failover_ms`, token counts."""
        return self._trace.to_dict()


async def joined(tokens: AsyncGenerator[Token, None]) -> AsyncGenerator[Token, None]:
    """All tokens as one, with the whole text."""
    async with aclosing(tokens):
        all_tokens = [token async for token in tokens]
    last = all_tokens[-1]
    text = "".join(token.text for token in all_tokens)
    yield Token(text=text, token_id=last.token_id, finish_reason=last.finish_reason)
