"""What a member measures of one step, and whom it refuses: what its record tells the others of the round.

Kept over all attempts at the step. `driver` owns it, `trainer` reads it. Times are the loop's, so they are what passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from swarm_protocol import limits
from swarm_protocol.records import Refusal, RoundReport

Measured: TypeAlias = Literal["interval", "group", "reduce", "commit", "apply"]

Weight: TypeAlias = Literal[0, 1, 2]
BROKE_PROTOCOL: Weight = 0
LEFT_OUT: Weight = 1
LESSENED: Weight = 2
"""How bad what is refused was: of more than a record holds, the worst are told."""


class RoundLog:
    """Of one step."""

    def __init__(self) -> None:
        self._seconds: dict[Measured, float] = {}
        self._phase: Measured | None = None
        self._since = 0.0
        self._refused: dict[str, tuple[Weight, str]] = {}

    def enter(self, phase: Measured | None, now: float) -> None:
        """From `now` on time is spent on `phase`; None: on nothing that is measured here."""
        if self._phase is not None:
            self.add(self._phase, now - self._since)
        self._phase, self._since = phase, now

    def add(self, phase: Measured, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def refuse(self, peer_id: str, reason: str, weight: Weight) -> None:
        """One reason for each peer: the worst, and of equally bad ones the first."""
        known = self._refused.get(peer_id)
        if known is None and len(self._refused) >= limits.MAX_GROUP_MEMBERS:
            return
        if known is None or weight < known[0]:
            self._refused[peer_id] = weight, reason

    def refuse_new(self, accused: Mapping[str, str], before: Mapping[str, str]) -> None:
        """Whoever is `accused` now and was not `before`."""
        for peer_id, reason in accused.items():
            if before.get(peer_id) != reason:
                self.refuse(peer_id, reason, BROKE_PROTOCOL)

    def report(self, outer_step: int, bytes_sent: int) -> RoundReport:
        worst = sorted(self._refused.items(), key=lambda item: item[1][0])[: limits.MAX_REFUSALS]
        return RoundReport(
            outer_step=outer_step,
            phases_s={phase: min(max(0.0, each), limits.MAX_MEASURED_S) for phase, each in self._seconds.items()},
            bytes_sent=min(bytes_sent, limits.MAX_ROUND_BYTES),
            refused=tuple(Refusal(peer_id=peer_id, reason=_line(reason)) for peer_id, (_, reason) in worst),
        )


def _line(reason: str) -> str:
    """What a record can hold of `reason`, some of which came from another peer."""
    line = "".join(char if char.isprintable() else "?" for char in reason)
    return line[: limits.MAX_REFUSAL_CHARS] or "for no reason that it gave"
