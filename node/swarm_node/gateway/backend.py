"""The face of the SDK that the gateway stands on: `swarm.AsyncClient` fits it.

Kept apart from the client so that the HTTP side can be tested alone, and so that what it relies on is written down.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol


class Token(Protocol):
    """One step of an answer. `finish_reason` is "stop" or "length" with the last one, None before."""

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str | None: ...


class Generation(Protocol):
    """A running answer: iterate over its tokens, `aclose` to free its chain."""

    def __aiter__(self) -> AsyncIterator[Token]: ...

    async def aclose(self) -> None: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    def trace(self) -> Any: ...


class ModelStatus(Protocol):
    """What the swarm has of one model."""

    @property
    def name(self) -> str: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def missing(self) -> Sequence[tuple[int, int]]: ...


class Backend(Protocol):
    """`swarm.AsyncClient`, as far as the gateway uses it."""

    async def models(self) -> Sequence[ModelStatus]: ...

    async def model(self, name: str) -> ModelStatus | None: ...

    def generate(  # noqa: PLR0913 the names of every text API
        self,
        *,
        model: str,
        prompt: str | None = None,
        messages: Sequence[dict[str, str]] | None = None,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int | None,
        stop: Sequence[str],
    ) -> Generation: ...
