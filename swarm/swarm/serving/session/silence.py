"""Decides when a client asks the servers of a session whether they are still there, and which of them to give up.

A server answers a ping at once, however long its step takes. One that is stopped or cut off answers none. So a client
that hears nothing from one of the servers pings all of them, and replaces those that stay silent, long before a slow
step would be too late. While many rows are under way, behind which a ping may wait on a slow line, servers have longer
to answer.
Pure: times are arguments, and `session` pings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.serving.session.session_actions import PingServers
from swarm.serving.session.stage import Stage

QUIET_S = 0.5
"""Seconds of a request without a word from one of the servers, after which all of them are pinged: the servers before
one that has stopped may go on with a prompt for minutes, and if all are silent, it is this client's line."""

ANSWER_S = 2.5
"""Seconds for an answer: a busy machine or a radio link may pause for a second, and an answer waits as long behind what
else the server sends over its home's line. It doubles with each time that servers of the session are given up for
silence, up to MAX_ANSWER_S, since the line may only be slow, and each time has rows run again."""

MAX_ANSWER_S = 6.0
"""The maximum, and the time for an answer while many rows are under way."""


class SilenceWatch:
    """Watches one session during its requests."""

    def __init__(self) -> None:
        self._since_s = math.inf  # when a request began, or the last answers came
        self._heard_s: dict[Stage, float] = {}  # by stage that was heard of since then, or since the question
        self._is_asking = self._is_patient = False
        self._answer_s = ANSWER_S

    def due_s(self, stages: Sequence[Stage]) -> float:
        """Return when the servers of these stages are to be asked, unless they are heard of before."""
        if self._is_asking:
            return math.inf
        heard_s = [self._heard_s.get(stage, self._since_s) for stage in stages if not stage.is_local]
        return min(heard_s, default=self._since_s) + QUIET_S

    def begin(self, now_s: float) -> None:
        """Start to watch, since a request begins."""
        if not self._is_asking:
            self._since_s = now_s
            self._heard_s.clear()

    def hear(self, stage: Stage, now_s: float) -> None:
        """Record that something has come from the stage's server."""
        self._heard_s[stage] = now_s

    def ask(self, stages: Sequence[Stage], *, is_in_bulk: bool) -> PingServers:
        """Return the action that pings the servers of these stages. `is_in_bulk`: many rows are under way."""
        self._is_asking, self._is_patient = True, is_in_bulk
        self._heard_s.clear()
        return PingServers(tuple(stages), MAX_ANSWER_S if is_in_bulk else self._answer_s)

    def lost(self, silent: Sequence[Stage], now_s: float, *, is_in_bulk: bool) -> list[Stage]:
        """Return the stages to give up, of those whose servers were `silent`. There are none if a short ping may
        have waited behind rows that were asked for meanwhile."""
        may_wait = is_in_bulk and not self._is_patient
        lost = [stage for stage in silent if stage not in self._heard_s and not may_wait]
        self._is_asking = False
        self.begin(now_s)
        if lost:
            self._answer_s = min(2 * self._answer_s, MAX_ANSWER_S)
        return lost
