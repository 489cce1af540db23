"""Estimates how long the steps of a stage take, and holds the times at which the stage is given up.

Without a clock: times are arguments. `stage` uses both.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from swarm_protocol.records import ServeRecord

from swarm.serving.wire.multiplexed_connection import SLOWEST_SERVER_BYTES_PER_S

FLOOR_S = 5.0
"""Minimum seconds for a step of a server that answers pings: `silence` notices one that is stopped or cut off
sooner."""

FACTOR = 8.0
"""A step may take this many times as long as steps so far, since another session's prefill may run first."""

MAX_COMPUTE_S = 600.0
"""Maximum seconds that a server's claim can yield: a chunk of a prompt on a slow machine with others waiting is done by
then."""

MAX_TOKEN_S = 30.0
"""The maximum for one token. Without it, the timeout for a server that always answers just in time would grow for
ever."""

RECENT_PASSES = 8
"""Number of passes by which a stage counts as slow: each yields one token, or several with drafts."""


class StepTimer:
    """Estimates how long a step of a stage may take: at first from the server's own claim, then from its steps so far.
    `times_ms` are those of the last passes."""

    __slots__ = ("_decode_s", "_prefill_s", "times_ms")

    def __init__(self, record: ServeRecord, num_blocks: int) -> None:
        self.times_ms: deque[float] = deque(maxlen=RECENT_PASSES)
        crowd = 1 + record.queue_depth
        self._decode_s = num_blocks * record.decode_ms_per_block * crowd / 1000
        self._prefill_s = num_blocks * record.prefill_ms_per_token * crowd / 1000

    def timeout_s(self, num_tokens: int, num_bytes: int) -> float:
        expected_s = self._decode_s if num_tokens == 1 else self._prefill_s * num_tokens
        max_s = MAX_TOKEN_S if num_tokens == 1 else MAX_COMPUTE_S
        return FLOOR_S + min(FACTOR * expected_s, max_s) + num_bytes / SLOWEST_SERVER_BYTES_PER_S

    def expected_s(self, num_tokens: int) -> float:
        """Return the seconds that a prompt of `num_tokens` takes if nothing else runs, at most MAX_COMPUTE_S."""
        return min(self._prefill_s * num_tokens, MAX_COMPUTE_S)

    def took(self, num_tokens: int, seconds: float) -> None:
        if num_tokens == 1:
            self._decode_s += 0.2 * (seconds - self._decode_s)
        else:
            self._prefill_s += 0.2 * (seconds / num_tokens - self._prefill_s)

    def recent_ms(self) -> float:
        """Return the mean time of the last passes without the longest, which may have waited for another session's
        prompt; infinity if it is not known yet."""
        times_ms = self.times_ms
        if len(times_ms) < RECENT_PASSES:
            return math.inf
        return (sum(times_ms) - max(times_ms)) / (RECENT_PASSES - 1)


@dataclass(slots=True)
class Deadline:
    """The times at which a stage is given up (`due_s`) and fed once more (`feed_again_s`).

    Both apply to all positions up to `goal`: a server that reports them one by one gains no time.
    """

    goal: int = 0
    due_s: float = math.inf
    feed_again_s: float = math.inf
    was_postponed: bool = False

    def postpone(self, num_bytes: int, now_s: float) -> bool:
        """Allow, once, the time of `num_bytes` behind which the report may wait. Return whether the stage is kept for
        now."""
        if not num_bytes or self.was_postponed:
            return False
        self.due_s, self.was_postponed = now_s + num_bytes / SLOWEST_SERVER_BYTES_PER_S, True
        return True
