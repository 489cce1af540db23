"""Keeps what `status` says of this node's probation, and of what the author of its run has endorsed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm.training.trainer_events import OnProbation, StateEndorsed, TrainingEvent
from swarm_protocol.control_messages import TrainingStatus


@dataclass(slots=True, kw_only=True)
class OwnStanding:
    """What the newest events of a member say. A run has `probation_steps` for newcomers."""

    probation_steps: int
    steps_left: int = 0
    endorsed: StateEndorsed | None = None

    def take(self, event: TrainingEvent) -> None:
        """Take in an event, whatever it is about."""
        if isinstance(event, OnProbation):
            self.steps_left = event.steps_left
        elif isinstance(event, StateEndorsed):
            self.endorsed = event

    def added_to(self, status: TrainingStatus) -> TrainingStatus:
        if self.steps_left:
            status = replace(status, steps_left=self.steps_left, probation_steps=self.probation_steps)
        if self.endorsed is not None:
            step, is_other = self.endorsed.step, self.endorsed.is_other
            status = replace(status, endorsed_step=step, endorses_other=is_other)
        return status
