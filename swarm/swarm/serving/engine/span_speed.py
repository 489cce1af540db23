"""Estimates how long passes over a span take: measured before it is announced, observed at work, and the step sizes
from that.

`measure` runs a prompt and some decodes on the span's own blocks; it blocks and runs in the engine's thread.
`ObservedSpeed` and `StepCost` are bookkeeping without a clock, owned by the engine.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median

import torch

from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool
from swarm.serving.model.span import STEPS, Span

PREFILL_TOKENS = 64
NUM_STEPS = 7
NUM_STEPS_AGAIN = 2

WINDOW_PASSES = 64

MEASURED_PASSES = 16
"""Weight of a measurement, in passes: after that many passes that differ, the passes begin to count more."""

MIN_PROMPT_TOKENS = PREFILL_TOKENS // 2
"""Least prompt tokens of a pass that measures the time of one: with fewer, reading the weights dominates."""

FIRST_TOKENS = 64
"""A step before anything was measured: a fraction of a second on a slow machine."""

MIN_TOKENS = 16
"""Least prompt tokens of a step: prompts must advance on slow machines too, and a pass for fewer is wasted."""

ROUND_TOKENS = 64
"""Kernels take rows in groups of this size (`packing`): a last group that is not full costs as much as a full one."""

WEIGHT = 0.3
"""Weight of a measurement that is better than expected. A worse one counts fully, so that the bound holds again in
the next step."""


_WORTH = 0.8
"""Share of the time to which doubling the threads has to bring it."""

_MOST_FAILED = 2
"""Numbers of threads in a row that are not worth it: then larger ones are not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSpeed:
    """Milliseconds of one block for one token, and bytes of cache that one token takes on the whole span."""

    prefill_ms: float
    decode_ms: float
    kv_bytes_per_token: int


def measure(span: Span) -> SpanSpeed:
    """Run one long prefill to warm up and one to measure, then take the best of some decodes.

    The span decodes from then on with as many threads as were found worthwhile.
    """
    num_blocks = span.end - span.start
    num_prompt_pages = -(-PREFILL_TOKENS // PAGE_TOKENS)
    pool = span.new_pool(num_prompt_pages + max(STEPS))
    prompt_pages = range(num_prompt_pages)
    prompt = SequenceRows(num_tokens=PREFILL_TOKENS, position=0, pages=prompt_pages, want=Want.LAST)
    # of sequences that have the same prompt
    decodes = [
        SequenceRows(
            num_tokens=1, position=PREFILL_TOKENS, pages=[*prompt_pages, num_prompt_pages + sequence], want=Want.LAST
        )
        for sequence in range(max(STEPS))
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


def worthwhile(time_ms: Callable[[int], float], most: int) -> int:
    """Return the smallest number of threads, a power of two or `most`, beyond which a fifth is not saved for each
    doubling.

    One doubling that does not pay is not enough to stop, since PyTorch may treat a single thread specially; two are.
    """
    counts = [1 << doublings for doublings in range((most - 1).bit_length())] + [most]
    chosen, chosen_ms, num_failed = 1, time_ms(1), 0
    for count in counts[1:]:
        count_ms = time_ms(count)
        if count_ms <= chosen_ms * _WORTH ** math.log2(count / chosen):
            chosen, chosen_ms, num_failed = count, count_ms, 0
        elif (num_failed := num_failed + 1) == _MOST_FAILED:
            break
    return chosen


def step_again_ms(span: Span, num_tokens: int) -> float:
    """Return the milliseconds of one block for each of `num_tokens`, the best of a few steps, of a span that was
    measured before.

    Several are a prompt; one comes after a prompt, of zeros.
    """
    position = PREFILL_TOKENS if num_tokens == 1 else 0
    num_pages = -(-(position + num_tokens) // PAGE_TOKENS)
    step = SequenceRows(num_tokens=num_tokens, position=position, pages=range(num_pages), want=Want.LAST)
    pool = span.new_pool(num_pages)
    best_ms = min(_timed_ms(span, pool, [step]) for _ in range(NUM_STEPS_AGAIN))
    return best_ms / num_tokens / (span.end - span.start)


def _timed_ms(span: Span, pool: KVPool, pieces: Sequence[SequenceRows]) -> float:
    num_rows = sum(piece.num_tokens for piece in pieces)
    x = torch.zeros(num_rows, span.hidden_size, dtype=span.dtype, device=span.device)
    if span.is_first:
        x = torch.zeros(num_rows, dtype=torch.int64, device=span.device)
    batch = Batch(x=x, pieces=tuple(pieces), start=span.start, end=span.end)
    since = time.perf_counter()
    output = span.run(batch, pool)[-1]
    assert output is not None
    output.sum().item()  # waits for an accelerator
    return (time.perf_counter() - since) * 1000


class ObservedSpeed:
    """Begins with what was `measured`."""

    def __init__(self, measured: SpanSpeed) -> None:
        self._measured = measured
        self._decode_ms = deque([measured.decode_ms] * MEASURED_PASSES, maxlen=WINDOW_PASSES)
        self._prefill_ms = deque([measured.prefill_ms] * MEASURED_PASSES, maxlen=WINDOW_PASSES)

    @property
    def speed(self) -> SpanSpeed:
        return replace(self._measured, decode_ms=median(self._decode_ms), prefill_ms=median(self._prefill_ms))

    def passed(self, num_decodes: int, num_prefill_tokens: int, num_blocks: int, pass_ms: float) -> None:
        """Record that a pass over `num_blocks` took `pass_ms`, for single tokens and tokens of prompts."""
        block_ms = pass_ms / num_blocks
        if not num_prefill_tokens:
            # several tokens take at least as long as one, so that they can only show that one takes less
            if num_decodes == 1 or block_ms < median(self._decode_ms):
                self._decode_ms.append(block_ms)
        elif not num_decodes and num_prefill_tokens >= MIN_PROMPT_TOKENS:
            self._prefill_ms.append(block_ms / num_prefill_tokens)

    def measured_again(self, decode_ms: float, prefill_ms: float) -> None:
        """Take in a measurement of the idle span."""
        self._decode_ms.extend([decode_ms] * MEASURED_PASSES)
        self._prefill_ms.extend([prefill_ms] * MEASURED_PASSES)


class StepCost:
    """`max_step_ms` bounds the time of a step with prompt tokens, and `max_alone_ms` that of one whose sequence is the
    only one: for few tokens each, a pass over the weights takes about as long as for many. `max_step_tokens` bounds
    their number."""

    def __init__(self, *, max_step_ms: float, max_alone_ms: float, max_step_tokens: int) -> None:
        self._max_step_ms = max_step_ms
        self._max_alone_ms = max_alone_ms
        self._max_step_tokens = max_step_tokens
        self._decode_ms = 0.0
        self._token_ms = 0.0

    def prefill_tokens(self, *, is_alone: bool = False) -> int:
        """Return the number of prompt tokens that a step may have now, beside any decodes."""
        if not self._token_ms:
            return min(FIRST_TOKENS, self._max_step_tokens)
        max_ms = self._max_alone_ms if is_alone else self._max_step_ms
        fitting = int((max_ms - self._decode_ms) / self._token_ms)
        if fitting > ROUND_TOKENS:
            fitting -= fitting % ROUND_TOKENS
        return min(max(fitting, MIN_TOKENS), self._max_step_tokens)

    def measured(self, num_prefill_tokens: int, step_ms: float) -> None:
        """Record that a step with these prompt tokens, or with none, has taken `step_ms`."""
        if not num_prefill_tokens:
            self._decode_ms = _learnt(self._decode_ms, step_ms, 1.0)
            return
        token_ms = max(step_ms - self._decode_ms, 1e-3) / num_prefill_tokens
        # a short rest of a prompt says little of a full step
        share = min(1.0, num_prefill_tokens / self.prefill_tokens())
        self._token_ms = _learnt(self._token_ms, token_ms, share)


def _learnt(known: float, found: float, weight: float) -> float:
    if not known:
        return found
    return known + weight * (1.0 if found > known else WEIGHT) * (found - known)
