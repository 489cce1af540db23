"""What a span really takes for a token on this machine: measured on its own blocks, before it is announced.

Blocking; runs in the engine's thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from swarm.serving.model.batch import PAGE_TOKENS, Batch, Slice, Want
from swarm.serving.model.kv_pool import KVPool
from swarm.serving.model.span import Span
from swarm.serving.model.threads import STEPS, worthwhile

PREFILL_TOKENS = 64
NUM_STEPS = 7
NUM_STEPS_AGAIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSpeed:
    """Milliseconds of one block for one token, and bytes of cache that one token takes on the whole span."""

    prefill_ms: float
    decode_ms: float
    kv_bytes_per_token: int


def measure(span: Span) -> SpanSpeed:
    """One long prefill to warm up, one to measure, then the best of some decodes.

    The span decodes from then on with as many threads as were found worthwhile.
    """
    num_blocks = span.end - span.start
    num_prompt_pages = -(-PREFILL_TOKENS // PAGE_TOKENS)
    pool = span.new_pool(num_prompt_pages + max(STEPS))
    prompt_pages = range(num_prompt_pages)
    prompt = Slice(num_tokens=PREFILL_TOKENS, position=0, pages=prompt_pages, want=Want.LAST)
    # of seats that have the same prompt
    decodes = [
        Slice(num_tokens=1, position=PREFILL_TOKENS, pages=[*prompt_pages, num_prompt_pages + seat], want=Want.LAST)
        for seat in range(max(STEPS))
    ]
    for _ in range(2):
        prefill_ms = _timed_ms(span, pool, [prompt])

    @cache  # the number of threads that is chosen has been measured
    def step_ms(num_rows: int, num_threads: int) -> float:
        span.step_threads[num_rows] = num_threads
        # the best: what others do meanwhile, such as loading, too, says nothing of later
        return min(_timed_ms(span, pool, decodes[:num_rows]) for _ in range(NUM_STEPS))

    if span.device.type == "cpu":
        for num_rows in STEPS:
            span.step_threads[num_rows] = worthwhile(partial(step_ms, num_rows), span.num_threads)
    return SpanSpeed(
        prefill_ms=prefill_ms / PREFILL_TOKENS / num_blocks,
        decode_ms=step_ms(1, span.step_threads[1]) / num_blocks,
        kv_bytes_per_token=span.kv_bytes_per_token,
    )


def step_again_ms(span: Span, num_tokens: int) -> float:
    """Milliseconds of one block for each of `num_tokens`, the best of a few steps, of a span that was measured before.

    Several are a prompt; one comes after a prompt, of zeros.
    """
    position = PREFILL_TOKENS if num_tokens == 1 else 0
    num_pages = -(-(position + num_tokens) // PAGE_TOKENS)
    step = Slice(num_tokens=num_tokens, position=position, pages=range(num_pages), want=Want.LAST)
    pool = span.new_pool(num_pages)
    best_ms = min(_timed_ms(span, pool, [step]) for _ in range(NUM_STEPS_AGAIN))
    return best_ms / num_tokens / (span.end - span.start)


def _timed_ms(span: Span, pool: KVPool, slices: Sequence[Slice]) -> float:
    num_rows = sum(piece.num_tokens for piece in slices)
    x = torch.zeros(num_rows, span.hidden_size, dtype=span.dtype, device=span.device)
    if span.is_first:
        x = torch.zeros(num_rows, dtype=torch.int64, device=span.device)
    batch = Batch(x=x, slices=tuple(slices), start=span.start, end=span.end)
    since = time.perf_counter()
    output = span.run(batch, pool)[-1]
    assert output is not None
    output.sum().item()  # waits for an accelerator
    return (time.perf_counter() - since) * 1000
