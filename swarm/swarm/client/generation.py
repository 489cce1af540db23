"""Defines the running answer to a request, of which both clients hand out one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from swarm_protocol.errors import SessionError

from swarm.serving.session.generate import Token
from swarm.serving.session.trace import Trace


class Generation:
    """A running answer. It starts when the first token is asked for; `aclose` frees the chain at any time."""

    def __init__(self, start: Callable[[Trace], AsyncGenerator[Token, None]], model: str) -> None:
        self._trace = Trace(model=model)
        self._tokens = start(self._trace)

    def __aiter__(self) -> AsyncIterator[Token]:
        return self._tokens

    async def aclose(self) -> None:
        await self._tokens.aclose()

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the prompt, or 0 until the first token has arrived."""
        return self._trace.num_prompt_tokens

    def trace(self) -> dict[str, Any]:
        """Return the trace so far: `hops` (servers, spans, ms), `replays`, `failover_ms`, token counts."""
        return self._trace.to_dict()


async def joined(tokens: AsyncGenerator[Token, None]) -> AsyncGenerator[Token, None]:
    """Yield all tokens as one, with the whole text."""
    async with aclosing(tokens):
        all_tokens = [token async for token in tokens]
    last = all_tokens[-1]
    text = "".join(token.text for token in all_tokens)
    yield Token(text=text, token_id=last.token_id, finish_reason=last.finish_reason)


async def within(timeout_s: float, tokens: AsyncGenerator[Token, None]) -> AsyncGenerator[Token, None]:
    """Yield the tokens. Raises SessionError if the last one has not come `timeout_s` after the first was asked for."""
    until_s = asyncio.get_running_loop().time() + timeout_s
    async with aclosing(tokens):
        while True:
            try:
                # for each token, since the caller may ask for each in another task
                async with asyncio.timeout_at(until_s):
                    token = await anext(tokens, None)
            except TimeoutError:
                raise SessionError(
                    f"the answer took over {timeout_s:g} s", remedy="allow more with timeout_s, or ask for fewer tokens"
                ) from None
            if token is None:
                return
            yield token
