"""The request that a pipeline answers, and the token that may have gone with a lost server.

Both are plain values of the pipeline, without I/O. A request also notes in the traces of stages what a token took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.serving.session.stage import Stage, StepReport


@dataclass(slots=True, kw_only=True)
class PendingRequest:
    """Holds what the caller asked for last: the token after the last position. Positions before `answered` are
    answered.

    `num_drawn` tokens were drawn without being asked for and `ahead` more may be; `may_draw`: a server was asked to.
    `is_timed`: a single token is under way since `asked_s`, through stages that have not changed, of which `num_timed`
    have said that they spent `spent_ms` on it.
    """

    answered: int = 0
    ahead: int = 0
    num_drawn: int = 0
    may_draw: bool = False
    asked_s: float = 0.0
    is_timed: bool = False
    num_timed: int = 0
    spent_ms: float = 0.0

    def goes_on(self, now_s: float) -> None:
        """Note that the next token, which was drawn ahead, is asked for now."""
        self.ahead -= 1
        self.num_drawn += 1
        self.asked_s, self.is_timed, self.num_timed, self.spent_ms = now_s, True, 0, 0.0

    def note_spent(self, report: StepReport, all_upstream: Sequence[Stage]) -> None:
        """Note what the token took on the server that reports, whose stage notes that itself, and on those that pushed
        it there."""
        self.num_timed += 1 + len(report.upstream_ms)
        self.spent_ms += report.compute_ms + report.queue_ms + sum(map(sum, report.upstream_ms))
        for upstream, (compute_ms, queue_ms) in zip(reversed(all_upstream), reversed(report.upstream_ms), strict=False):
            upstream.trace.step(compute_ms, queue_ms)

    def note_answered(self, report: StepReport, stages: Sequence[Stage], now_s: float) -> None:
        """Note that the token has passed through all `stages`, the last of which reports it."""
        self.note_spent(report, stages[:-1])
        if self.num_timed == len(stages):
            # it is not known which link took it
            wire_ms = (now_s - self.asked_s) * 1000 - self.spent_ms
            for stage in stages:
                stage.trace.wire_ms += max(0.0, wire_ms) / len(stages)


@dataclass(slots=True)
class LostToken:
    """A token that a lost server may have drawn and that the client never heard of, at `position` or later.

    The `suspects` have until `due_s` to say whether they received it; `is_held`: one of them did.
    """

    position: int = 0
    suspects: set[Stage] = field(default_factory=set)
    due_s: float = math.inf
    is_held: bool = False

    def check(self, reached: int) -> bool:
        """Note how far a stage was given inputs; return whether one of them holds the token."""
        self.is_held = self.is_held or (bool(self.suspects) and reached > self.position)
        return self.is_held
