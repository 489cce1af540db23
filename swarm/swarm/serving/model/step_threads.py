"""Chooses how many threads compute a step of a span: few rows may be done sooner by fewer threads than cores.

`span_speed.measure` chooses the numbers, by `worthwhile`, and `Span.run` computes with them. No state but PyTorch's
setting of the process, which `threads` changes for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

STEPS = (1, 16)
"""Numbers of rows for which the worthwhile number of threads is measured: one session's next token, and many
sessions'."""

_WORTH = 0.8
"""Share of the time to which doubling the threads has to bring it."""

_MOST_FAILED = 2
"""Numbers of threads in a row that are not worth it: then larger ones are not tried."""


def step_like(num_rows: int) -> int | None:
    """Return which of STEPS a step of `num_rows` is like; None for a prompt's, which uses every core."""
    if num_rows < STEPS[1] // 2:
        return STEPS[0]
    return STEPS[1] if num_rows <= 2 * STEPS[1] else None


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


@contextmanager
def threads(num_threads: int, usual: int) -> Iterator[None]:
    """Compute with `num_threads`, and with `usual` again afterwards. The setting is the process's: one at a time."""
    if num_threads == usual:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
