"""Decides when a session leaves a server that answers, but has become much slower than others promise to be.

The client times each stage itself: from the report of the stage before until the stage's own. So the time covers the
link, the queue, and a process that hardly runs. It is the time of a pass, as servers promise it, however many tokens
the pass yields with drafts. `StragglerWatch` names the slowest stage once the answer has been slow for some seconds on
average: near the limit, the times of single passes lie on both sides of it. Then the session looks for other servers,
and `Straggler.is_worth_leaving` compares. If it is, the session moves as from a server that leaves: the keys and values
are handed over while the old server goes on.

Sessions must not all rush to one server, nor swing between two. So the other servers' announced load counts, each
session waits for a time of its own, and each search doubles the pause until its next one.

An answer whose tokens the caller requests one by one does not move, since nobody knows that more will come. A server
that delays its pushes makes the next one look slow; it could also fail them. Pure: times are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.serving.session.stage import Stage

FACTOR = 3.0
"""A stage is left if it takes this many times as long as other servers promise. Less may be a busy minute, or a claim
that is too good."""

MIN_TOKEN_MS = 100.0
"""An answer of more tokens a second than this allows is fast enough to read, and stays where it is."""

MIN_SAVED_MS = 50.0
"""Minimum milliseconds that a move must save for each pass."""

MOVE_S = 2.0
"""Seconds that a move costs at least, by which passes to come must be faster. Running the prefix again comes on top,
as it must be done if the keys and values cannot be handed over."""

WAIT_S = 4.0
"""Minimum seconds for which an answer must be slow. Sessions draw up to three times as many, so that they see in the
records of servers which sessions have moved before them."""

LOOK_S = 0.5
"""Seconds between two looks at the times."""

PAUSE_S = 30.0
"""Seconds until the next search of a session after its first one. Each search doubles them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A stage that takes `pass_ms` for each pass, of which about `num_passes` are to come.

    The other servers of the chain take at least `slowdown` times as long as they promised. Others would, too: this
    machine or its line may be what is slow.
    """

    stage: Stage
    pass_ms: float
    slowdown: float
    num_passes: int

    def is_worth_leaving(self, promised_ms: float, replay_s: float) -> bool:
        """Return whether servers that promise a pass in `promised_ms`, and need `replay_s` to run the prefix again,
        are so much faster that a move pays."""
        saved_ms = self.pass_ms - self.slowdown * promised_ms
        return (
            self.pass_ms >= FACTOR * self.slowdown * promised_ms
            and saved_ms >= MIN_SAVED_MS
            and self.num_passes * saved_ms / 1000 >= MOVE_S + self.slowdown * replay_s
        )


class StragglerWatch:
    """Watches the stages of one session. Its answer must be slow for `wait_s`."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._pause_s = PAUSE_S
        self._look_at_s = 0.0
        self._since_s = math.inf  # when the wait began, with this number of positions
        self._length = 0

    def find(self, stages: Sequence[Stage], num_passes: int, now_s: float) -> Straggler | None:
        """Return the stage to compare with other servers, if it is time. The `stages` are all of the model, in order;
        about `num_passes` passes are to come."""
        if now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + LOOK_S
        recent_ms, length = sum(stage.timer.recent_ms() for stage in stages), stages[-1].num_run
        if math.isinf(recent_ms) or (now_s - self._since_s) * 1000 < MIN_TOKEN_MS * (length - self._length):
            self._since_s, self._length = now_s, length
        if not MIN_TOKEN_MS <= recent_ms < math.inf or now_s - self._since_s < self._wait_s:
            return None
        found = _slowest(stages, num_passes)
        if found is not None:
            self._look_at_s, self._since_s = now_s + self._pause_s, math.inf
            self._pause_s *= 2
        return found


def _slowest(stages: Sequence[Stage], num_passes: int) -> Straggler | None:
    """Return the slowest stage on a server, or None if no stage takes long."""
    timed = [(stage.timer.recent_ms(), index) for index, stage in enumerate(stages) if _is_judged(stages, index)]
    pass_ms, slowest = max(timed, default=(0.0, 0))
    if pass_ms < MIN_SAVED_MS:
        return None
    slowdowns = [ms / stages[index].hop.cost_ms for ms, index in timed if index != slowest]
    return Straggler(
        stage=stages[slowest],
        pass_ms=pass_ms,
        slowdown=max(1.0, min(slowdowns, default=1.0)),
        num_passes=num_passes,
    )


def _is_judged(stages: Sequence[Stage], index: int) -> bool:
    """Return whether the stage may be left, and its time says how fast its server is. That of a server to which the one
    before cannot push, so that the client feeds it, does not."""
    stage, before = stages[index], stages[index - 1] if index else None
    if stage.is_local or stage.is_leaving:
        return False
    return before is None or before.is_local or before.link.leads_to(stage)
