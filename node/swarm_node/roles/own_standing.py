"""Says what is shown of a trainer's standing in a run: bans, probation and scores in words.

`RunTraining` fills it from a run's events; status replies and the dashboard's record read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from swarm.training import trainer_events as events
from swarm.training.trainer_events import HeldOutScored, OnProbation, StateEndorsed, TrainingEvent
from swarm_protocol.control_messages import TrainingStatus
from swarm_protocol.identity import short_id

from swarm_node.formatting import plural


@dataclass(slots=True, kw_only=True)
class OwnStanding:
    """Holds what the newest events of a member say. A run has `probation_steps` for newcomers."""

    probation_steps: int
    steps_left: int = 0
    entered: str = ""
    endorsed: StateEndorsed | None = None
    scored: HeldOutScored | None = None

    def take(self, event: TrainingEvent) -> None:
        """Take in an event, whatever it is about."""
        if isinstance(event, OnProbation):
            self.steps_left = event.steps_left
        elif isinstance(event, events.RunEntered):
            self.entered = event.how
        elif isinstance(event, StateEndorsed):
            self.endorsed = event
        elif isinstance(event, HeldOutScored):
            self.scored = event

    def added_to(self, status: TrainingStatus) -> TrainingStatus:
        if self.steps_left:
            status = replace(status, steps_left=self.steps_left, probation_steps=self.probation_steps)
        status = replace(status, entered=self.entered)
        if self.endorsed is not None:
            step, is_other = self.endorsed.step, self.endorsed.is_other
            status = replace(status, endorsed_step=step, endorses_other=is_other)
        if self.scored is not None:
            status = replace(status, held_out=score_words(self.scored))
        return status


def score_words(scored: HeldOutScored) -> str:
    """Return how this node's work and the others' do on held-out data."""
    own = "not measured yet" if scored.own is None else f"{scored.own:+.3f} nats a step"
    middle, lowest = median(scored.scores.values()), min(scored.scores, key=lambda peer: scored.scores[peer])
    trainers = plural(len(scored.scores), "trainer")
    worst = f"lowest {scored.scores[lowest]:+.3f} ({short_id(lowest)})"
    return f"this node {own}; of {trainers}, median {middle:+.3f}, {worst}"
