"""An arithmetic span for tests of the engine, and an engine around it.

A row's output depends on the value and position of every token before it, read through its sequence's pages, so that a
wrong page or position gives a wrong result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support.leaks import no_leaks
from swarm.serving.engine.engine import Engine
from swarm.serving.engine.sequence import EngineSequence
from swarm.serving.engine.span_speed import SpanSpeed
from swarm.serving.model.batch import Batch, Want
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool, KVShape
from swarm.serving.sampling.sampling import Pick
from swarm.serving.server.deployment import ServerOptions
from swarm.testing import virtual_time
from swarm_protocol.session_frames import TokenDraw
from torch import Tensor

VOCAB = 64
NUM_BLOCKS = 4
NUM_PAGES = 40
MODULUS = 1009
REVISION = "r"


@dataclass
class Sums:
    """Keeps a row's value in each block.

    A row's output is a sum over all values up to it, weighted by position. `batches` are those it ran. `on_run`, if
    set, is called before each in the engine's thread.
    """

    start: int = 0
    end: int = NUM_BLOCKS
    num_blocks: int = NUM_BLOCKS
    context_tokens: int = 2**20
    hidden_size: int = 4
    vocab_size: int = VOCAB
    batches: list[Batch] = field(default_factory=list)
    on_run: Callable[[Batch], None] = lambda batch: None

    def pool(self, num_pages: int = NUM_PAGES) -> KVPool:
        shape = KVShape(num_heads=1, key_width=1, value_width=1)
        return KVPool([shape] * (self.end - self.start), num_pages, torch.float32, "cpu")

    def run(self, batch: Batch, pool: KVPool) -> list[Tensor | None]:
        self.batches.append(batch)
        self.on_run(batch)
        values = batch.x.float() if batch.x.ndim == 1 else batch.x[:, 0]
        outputs: list[Tensor | None] = []
        for piece in batch.pieces:
            own, values = values[: piece.num_tokens], values[piece.num_tokens :]
            outputs.append(self._one(own, piece, pool, batch))
        assert not len(values)
        return outputs

    def _one(self, values: Tensor, piece: Any, pool: KVPool, batch: Batch) -> Tensor | None:
        length = piece.position + piece.num_tokens
        slots = [piece.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in range(length)]
        for block in range(batch.start - self.start, batch.end - self.start):
            pool.keys_SKD[block][slots[piece.position :], 0, 0] = values
        sums = sums_of(pool.keys_SKD[batch.end - self.start - 1][slots, 0, 0])[piece.position :]
        if piece.want is Want.NOTHING:
            return None
        rows = rows_of(sums, batch.end == self.num_blocks)
        return rows[-1:] if piece.want is Want.LAST else rows


def sums_of(values: Tensor) -> Tensor:
    weights = torch.arange(1, len(values) + 1, dtype=torch.float64)
    return ((values.double() + 1) * weights).cumsum(0) % MODULUS


def rows_of(sums: Tensor, is_last: bool) -> Tensor:
    if not is_last:
        return sums[:, None].float().repeat(1, 4)
    return ((sums[:, None] * 7 + torch.arange(VOCAB) * 13) % 101).float() / 10


def alone(tokens: Sequence[int]) -> Tensor:
    """Return the logits of all of `tokens`, without any engine."""
    return rows_of(sums_of(torch.tensor(tokens, dtype=torch.float32)), True)


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(alone(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + index * index * 7 + index) % VOCAB for index in range(num_tokens)]


GREEDY = Pick(TokenDraw())


async def generate(sequence: EngineSequence, prompt: Sequence[int], num_tokens: int) -> list[int]:
    done = await sequence.step(ids(*prompt), Want.NOTHING, GREEDY)
    tokens = []
    while True:
        tokens += [token.token_id for token in done.tokens]
        if len(tokens) == num_tokens:
            return tokens
        done = await sequence.step(ids(tokens[-1]), Want.NOTHING, GREEDY)


def with_engine(
    work: Callable[[Engine, Sums], Awaitable[None]],
    *,
    span: Sums | None = None,
    num_pages: int = NUM_PAGES,
    compute_s: float = 0.001,
    max_step_ms: float = 1e9,
    max_alone_ms: float = 1e9,
    speed: SpanSpeed | None = None,
    **options: Any,
) -> None:
    """Run `work` beside the engine, and check afterwards that nothing is left.

    No step is cut for its real duration, so that a busy machine does not change the result.
    """
    span = span or Sums()

    async def run() -> None:
        allowed = ServerOptions(max_step_ms=max_step_ms, max_alone_ms=max_alone_ms, **options)
        engine = Engine(span, span.pool(num_pages), allowed, revision=REVISION, speed=speed)
        running = asyncio.create_task(engine.run(), name="engine")
        try:
            await work(engine, span)
            assert engine.num_waiting == 0
        finally:
            running.cancel()
            await asyncio.wait({running})
            engine.close(wait=True)
        assert engine.num_sequences == 0
        assert engine.pages.num_free == num_pages

    with no_leaks():
        virtual_time.run(run(), compute_s=lambda function: compute_s)
