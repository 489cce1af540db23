"""The face of the SDK that the gateway stands on: `swarm.AsyncClient` fits it.

Kept apart from the client so that the HTTP side can be tested alone, and so that what it relies on is written down.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from swarm.client.request import Question, Request
from torch import Tensor


class Likely(Protocol):
    """A token that could have come; `data` are its bytes."""

    @property
    def data(self) -> bytes: ...

    @property
    def logprob(self) -> float: ...


class Token(Protocol):
    """One step of an answer. `finish_reason` is "stop" or "length" with the last one, None before.

    `logprob` is None unless probabilities were asked for, and for an end token, which is no part of the answer.
    """

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def data(self) -> bytes: ...

    @property
    def logprob(self) -> float | None: ...

    @property
    def top(self) -> Sequence[Likely]: ...


class Generation(Protocol):
    """A running answer: iterate over its tokens, `aclose` to free its chain.

    The trace is plain values; of these the gateway itself reads `num_reused_tokens` and the length of `replays`.
    """

    def __aiter__(self) -> AsyncIterator[Token]: ...

    async def aclose(self) -> None: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    def trace(self) -> dict[str, Any]: ...


class OtherRevision(Protocol):
    """Other weights that are served under the same name."""

    @property
    def revision(self) -> str: ...

    @property
    def num_servers(self) -> int: ...

    @property
    def is_whole(self) -> bool: ...


class ModelStatus(Protocol):
    """What the swarm has of one model: the spans that no record offers, those that nobody could be reached for, how
    long ago a server that is counted on was last heard of, and what else goes by its name."""

    @property
    def name(self) -> str: ...

    @property
    def revision(self) -> str: ...

    @property
    def others(self) -> Sequence[OtherRevision]: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def missing(self) -> Sequence[tuple[int, int]]: ...

    @property
    def unreachable(self) -> Sequence[tuple[int, int]]: ...

    @property
    def age_s(self) -> float: ...


class Backend(Protocol):
    """`swarm.AsyncClient`, as far as the gateway uses it."""

    async def models(self) -> Sequence[ModelStatus]: ...

    async def model(self, name: str) -> ModelStatus | None: ...

    def answer(self, request: Request) -> Generation: ...

    async def tokenize(self, text: Question, *, model: str) -> Sequence[int]: ...

    async def decode(self, token_ids: Sequence[int], *, model: str) -> str: ...

    async def context_tokens(self, model: str) -> int: ...

    async def pooled(self, text: Sequence[int], *, model: str) -> Tensor: ...
