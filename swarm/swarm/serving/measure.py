"""What a span really takes for a token on this machine: measured on its own blocks, before it is announced.

Blocking; runs in the engine's thread. Legend of shapes: T positions, H hidden size.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.serving.blocks import KVCache, Span, Want

PREFILL_TOKENS = 64
NUM_DECODES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSpeed:
    """Milliseconds of one block for one token, and bytes of cache that one token takes on the whole span."""

    prefill_ms: float
    decode_ms: float
    kv_bytes_per_token: int


def measure(span: Span) -> SpanSpeed:
    """One long prefill to warm up, one to measure, then the median of some decodes."""
    num_blocks = span.end - span.start
    for _ in range(2):
        cache = span.new_cache()
        prefill_ms = _timed_ms(span, _input(span, PREFILL_TOKENS), cache)
    decode_ms = statistics.median(_timed_ms(span, _input(span, 1), cache) for _ in range(NUM_DECODES))
    one = span.new_cache()
    span.run(_input(span, 1), one, Want.NOTHING)
    return SpanSpeed(
        prefill_ms=prefill_ms / PREFILL_TOKENS / num_blocks,
        decode_ms=decode_ms / num_blocks,
        kv_bytes_per_token=max(one.num_bytes, 1),
    )


def _input(span: Span, num_tokens: int) -> Tensor:
    if span.is_first:
        return torch.zeros(num_tokens, dtype=torch.int64, device=span.device)
    return torch.zeros(num_tokens, span.hidden_size, dtype=span.dtype, device=span.device)


def _timed_ms(span: Span, x: Tensor, cache: KVCache) -> float:
    since = time.perf_counter()
    output = span.run(x, cache, Want.LAST)
    assert output is not None
    output.sum().item()  # waits for an accelerator
    return (time.perf_counter() - since) * 1000
