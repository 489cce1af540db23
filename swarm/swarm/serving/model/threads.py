"""How many of a processor's cores a step of few rows is worth.

One session's decoding waits for memory, so a second core adds little to it, while whoever else is on the machine (the
network's daemon, other servers, the owner) could use that core in full, and threads that wait for each other wait for
those, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

STEPS = (1, 16)
"""Numbers of rows for which it is found out: one session's next token, and many sessions'."""

_WORTH = 0.8
"""Twice as many threads have to bring the time down to this."""

_MOST_FAILED = 2
"""Numbers of threads in a row that are not worth it: then larger ones are not tried."""


def step_like(num_rows: int) -> int | None:
    """Which of STEPS a step of so many rows is like; None for a prompt's, which every core is worth."""
    if num_rows < STEPS[1] // 2:
        return STEPS[0]
    return STEPS[1] if num_rows <= 2 * STEPS[1] else None


def worthwhile(time_ms: Callable[[int], float], most: int) -> int:
    """The smallest number of threads, a power of two or `most`, beyond which a fifth is not saved for each doubling.

    Not the first doubling alone says so, for one thread may have a way of its own that two have not; two in a row do.
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
