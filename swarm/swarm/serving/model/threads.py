"""How many of a processor's cores a step of few rows is worth.

One session's decoding waits for memory, so a second core adds little to it, while whoever else is on the machine (the
network's daemon, other servers, the owner) could use that core in full, and threads that wait for each other wait for
those, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

STEPS = (1, 16)
"""Numbers of rows for which it is found out: one session's next token, and many sessions'."""

_WORTH = 0.8
"""Twice as many threads have to bring the time down to this."""


def step_like(num_rows: int) -> int | None:
    """Which of STEPS a step of so many rows is like; None for a prompt's, which every core is worth."""
    if num_rows < STEPS[1] // 2:
        return STEPS[0]
    return STEPS[1] if num_rows <= 2 * STEPS[1] else None


def worthwhile(time_ms: Callable[[int], float], most: int) -> int:
    """The number of threads, a power of two or `most`, beyond which twice as many save less than a fifth."""
    chosen, chosen_ms = 1, time_ms(1)
    while chosen < most:
        more = min(2 * chosen, most)
        more_ms = time_ms(more)
        if more_ms > _WORTH * chosen_ms:
            break
        chosen, chosen_ms = more, more_ms
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
