"""Estimates the time of passes over a span, measured before the announcement and observed at work, and sizes steps by
it.

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
"""Weight of a measurement in passes: after more than this many observed passes, the passes count more."""

MIN_PROMPT_TOKENS = PREFILL_TOKENS // 2
"""Minimum prompt tokens of a pass that measures the time per token: with fewer, reading the weights dominates."""

FIRST_TOKENS = 64
"""Prompt tokens of a step before any measurement: a fraction of a second on a slow machine."""

MIN_TOKENS = 16
"""Minimum prompt tokens of a step: prompts must advance on slow machines, too, and a pass for fewer is wasteful."""

ROUND_TOKENS = 64
"""Kernels process rows in groups of this size (`packing`): a partial group costs as much as a full one."""

WEIGHT = 0.3
"""Weight of a measurement that is faster than expected. A slower one counts fully, so that the next step keeps the time
limit."""


_WORTH = 0.8
"""A doubling of threads is worthwhile if it reduces the time to at most this share."""

_MOST_FAILED = 2
"""After this many consecutive thread counts that are not worthwhile, larger ones are not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSpeed:
    """Milliseconds per block and token, and bytes of cache per token on the whole span."""

    prefill_ms: float
    decode_ms: float
    kv_bytes_per_token: int


def measure(span: Span) -> SpanSpeed:
    """Measure a span: run one prefill to warm up and one to measure, then take the best of several decodes.

    Sets the number of threads with which the span decodes to the worthwhile one.
    """
    num_blocks = span.end - span.start
    trials = StepTrials(span)
    trials.prefill_ms()
    prefill_ms = trials.prefill_ms()
    step_ms = cache(partial(trials.step_ms, num_steps=NUM_STEPS))  # the chosen number was measured already
    if span.device.type == "cpu":
        for num_rows in STEPS:
            counts = thread_counts(span.num_threads)
            span.step_threads[num_rows] = worthwhile(partial(step_ms, num_rows), counts)
    return SpanSpeed(
        prefill_ms=prefill_ms / PREFILL_TOKENS / num_blocks,
        decode_ms=step_ms(1, span.step_threads[1]) / num_blocks,
        kv_bytes_per_token=span.kv_bytes_per_token,
    )


class StepTrials:
    """Measures a prompt, and decodes of up to `max(STEPS)` sequences that share it, by which a CPU's threads are
    chosen; on other devices, of one. All calls block; the engine's thread makes them."""

    def __init__(self, span: Span) -> None:
        num_prompt_pages = -(-PREFILL_TOKENS // PAGE_TOKENS)
        pages = range(num_prompt_pages)
        num_decodes = max(STEPS) if span.device.type == "cpu" else 1
        self._span = span
        self._pool = span.new_pool(num_prompt_pages + num_decodes)
        self._prompt = SequenceRows(num_tokens=PREFILL_TOKENS, position=0, pages=pages, want=Want.LAST)
        self._decodes = [
            SequenceRows(
                num_tokens=1, position=PREFILL_TOKENS, pages=[*pages, num_prompt_pages + sequence], want=Want.LAST
            )
            for sequence in range(num_decodes)
        ]

    def prefill_ms(self) -> float:
        """Return the milliseconds of a prompt of PREFILL_TOKENS."""
        return _timed_ms(self._span, self._pool, [self._prompt])

    def step_ms(self, num_rows: int, num_threads: int | None = None, *, num_steps: int) -> float:
        """Return the milliseconds of the best of `num_steps` steps, with the chosen number of threads or another one.

        Other work at the same time, such as loading, does not last, so the best step counts.
        """
        chosen = self._span.step_threads[num_rows]
        self._span.step_threads[num_rows] = num_threads or chosen
        try:
            return min(_timed_ms(self._span, self._pool, self._decodes[:num_rows]) for _ in range(num_steps))
        finally:
            self._span.step_threads[num_rows] = chosen


def thread_counts(most: int) -> list[int]:
    """Return the numbers of threads that are tried: the powers of two below `most`, and `most`."""
    return [1 << doublings for doublings in range((most - 1).bit_length())] + [most]


def thread_counts_near(chosen: int, most: int) -> list[int]:
    """Return the numbers of threads that are tried again: from half to four times the `chosen` number. One thread is
    not always among them, since it would take too long where many are right."""
    counts = thread_counts(most)
    place = counts.index(chosen)
    return counts[max(0, place - 1) : place + 3]


def worthwhile(time_ms: Callable[[int], float], counts: Sequence[int]) -> int:
    """Return the largest worthwhile number of threads of the ascending `counts`: each doubling up to it saves a fifth
    of the time.

    The search stops only after two counts that are not worthwhile, since PyTorch may treat a single thread specially.
    """
    chosen, num_failed = counts[0], 0
    chosen_ms = time_ms(chosen)
    for count in counts[1:]:
        count_ms = time_ms(count)
        if count_ms <= chosen_ms * _WORTH ** math.log2(count / chosen):
            chosen, chosen_ms, num_failed = count, count_ms, 0
        elif (num_failed := num_failed + 1) == _MOST_FAILED:
            break
    return chosen


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
    """The speed of a span from observed passes. Starts with the `measured` one."""

    def __init__(self, measured: SpanSpeed) -> None:
        self._measured = measured
        self._decode_ms = deque([measured.decode_ms] * MEASURED_PASSES, maxlen=WINDOW_PASSES)
        self._prefill_ms = deque([measured.prefill_ms] * MEASURED_PASSES, maxlen=WINDOW_PASSES)

    @property
    def speed(self) -> SpanSpeed:
        return replace(self._measured, decode_ms=median(self._decode_ms), prefill_ms=median(self._prefill_ms))

    def passed(self, num_decodes: int, num_prefill_tokens: int, num_blocks: int, pass_ms: float) -> None:
        """Record that a pass over `num_blocks` took `pass_ms` for these decodes and prompt tokens."""
        block_ms = pass_ms / num_blocks
        if not num_prefill_tokens:
            # several tokens take at least as long as one, so they can only show that one takes less
            if num_decodes == 1 or block_ms < median(self._decode_ms):
                self._decode_ms.append(block_ms)
        elif not num_decodes and num_prefill_tokens >= MIN_PROMPT_TOKENS:
            self._prefill_ms.append(block_ms / num_prefill_tokens)

    def measured_again(self, decode_ms: float, prefill_ms: float) -> None:
        """Add a measurement of the idle span."""
        self._decode_ms.extend([decode_ms] * MEASURED_PASSES)
        self._prefill_ms.extend([prefill_ms] * MEASURED_PASSES)


class StepCost:
    """Chooses the prompt tokens of a step. `max_step_ms` bounds the time of a step with prompt tokens, and
    `max_alone_ms` that of the only sequence: a pass over the weights takes about as long for few tokens as for many.
    `max_step_tokens` bounds the number of tokens."""

    def __init__(self, *, max_step_ms: float, max_alone_ms: float, max_step_tokens: int) -> None:
        self._max_step_ms = max_step_ms
        self._max_alone_ms = max_alone_ms
        self._max_step_tokens = max_step_tokens
        self._decode_ms = 0.0
        self._token_ms = 0.0

    def prefill_tokens(self, *, is_alone: bool = False) -> int:
        """Return the number of prompt tokens that a step may have now, in addition to decodes."""
        if not self._token_ms:
            return min(FIRST_TOKENS, self._max_step_tokens)
        max_ms = self._max_alone_ms if is_alone else self._max_step_ms
        fitting = int((max_ms - self._decode_ms) / self._token_ms)
        if fitting > ROUND_TOKENS:
            fitting -= fitting % ROUND_TOKENS
        return min(max(fitting, MIN_TOKENS), self._max_step_tokens)

    def measured(self, num_prefill_tokens: int, step_ms: float) -> None:
        """Record that a step with `num_prefill_tokens`, which may be 0, took `step_ms`."""
        if not num_prefill_tokens:
            self._decode_ms = _updated(self._decode_ms, step_ms, 1.0)
            return
        token_ms = max(step_ms - self._decode_ms, 1e-3) / num_prefill_tokens
        # the short end of a prompt says little about a full step
        share = min(1.0, num_prefill_tokens / self.prefill_tokens())
        self._token_ms = _updated(self._token_ms, token_ms, share)


def _updated(known: float, found: float, weight: float) -> float:
    if not known:
        return found
    return known + weight * (1.0 if found > known else WEIGHT) * (found - known)
