"""Says what is shown of a trainer's standing in a run: probation, entrance, endorsements, and scores in words."""

from __future__ import annotations

from statistics import median
from typing import Any

from swarm.training.trainer_events import HeldOutScored, OnProbation, RunEntered, StateEndorsed, TrainingEvent
from swarm_protocol.identity import short_id

from swarm_node.formatting import plural


def standing_in(event: TrainingEvent, probation_steps: int) -> dict[str, Any]:
    """Return the fields of a `TrainingStatus` that an event changes; a run has `probation_steps` for newcomers."""
    match event:
        case OnProbation():
            return {"steps_left": event.steps_left, "probation_steps": probation_steps if event.steps_left else 0}
        case RunEntered():
            return {"entered": event.how}
        case StateEndorsed():
            return {"endorsed_step": event.step, "endorses_other": event.is_other}
        case HeldOutScored():
            return {"held_out": score_words(event)}
        case _:
            return {}


def probation_words(steps_left: int) -> str:
    """Return how long this node still counts for less."""
    if not steps_left:
        return "this node counts fully from the next outer step on"
    return f"on probation: {plural(steps_left, 'more outer step')} until this node counts fully"


def score_words(scored: HeldOutScored) -> str:
    """Return how this node's work and the others' do on held-out data."""
    own = "not measured yet" if scored.own is None else f"{scored.own:+.3f} nats a step"
    middle, lowest = median(scored.scores.values()), min(scored.scores, key=lambda peer: scored.scores[peer])
    trainers = plural(len(scored.scores), "trainer")
    worst = f"lowest {scored.scores[lowest]:+.3f} ({short_id(lowest)})"
    return f"this node {own}; of {trainers}, median {middle:+.3f}, {worst}"
