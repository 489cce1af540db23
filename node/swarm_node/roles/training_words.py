"""The texts in which a node that trains a run reports events and its status."""

from __future__ import annotations

from statistics import median
from typing import Any

from swarm.training.evidence.bans import Ban, how_long
from swarm.training.run.layout import fragment_of
from swarm.training.trainer_events import (
    HeldOutScored,
    IntervalFailed,
    InvitationRefused,
    OnProbation,
    OtherHistory,
    OuterStep,
    RunEntered,
    RunResumed,
    StateEndorsed,
    TrainingEvent,
    Waiting,
)
from swarm_protocol.errors import first_few
from swarm_protocol.identity import short_id

from swarm_node.formatting import plural

MAX_NAMED = 8
"""Maximum number of peers that a line names."""


def standing_in(event: TrainingEvent, probation_steps: int) -> dict[str, Any]:
    """Return the fields of a `TrainingStatus` that an event changes. Newcomers of the run have `probation_steps`."""
    match event:
        case OnProbation():
            return {"steps_left": event.steps_left, "probation_steps": probation_steps if event.steps_left else 0}
        case RunEntered():
            return {"entered": event.how}
        case StateEndorsed():
            return {"endorsed_step": event.step, "endorses_other": event.is_other}
        case HeldOutScored():
            return {"held_out": score_words(event)}
        case OtherHistory() | RunResumed():  # all members follow the order by which the author resumes the run
            return {"other_history": event.words(short_id) if isinstance(event, OtherHistory) else ""}
        case _:
            return {}


def probation_words(steps_left: int) -> str:
    """Return how long this node still counts for less."""
    if not steps_left:
        return "this node counts fully from the next outer step on"
    return f"on probation: {plural(steps_left, 'more outer step')} until this node counts fully"


def score_words(scored: HeldOutScored) -> str:
    """Return the held-out score of this node and a summary of the others'."""
    own = "not measured yet" if scored.own is None else f"{scored.own:+.3f} nats a step"
    middle, lowest = median(scored.scores.values()), min(scored.scores, key=lambda peer: scored.scores[peer])
    trainers = plural(len(scored.scores), "trainer")
    worst = f"lowest {scored.scores[lowest]:+.3f} ({short_id(lowest)})"
    return f"this node {own}; of {trainers}, median {middle:+.3f}, {worst}"


def beside(event: TrainingEvent, fragments: int) -> dict[str, object]:
    """Return fields that are reported with an event besides its own. The run has this number of `fragments`."""
    match event:
        case OuterStep():
            return {"fragment": fragment_of(event.step, fragments)}
        case OnProbation():
            return {"words": probation_words(event.steps_left)}
        case _:
            return {}


def trouble(event: IntervalFailed | InvitationRefused | OtherHistory, run_id: str) -> tuple[str, str]:
    """Return the message and the remedy of a warning."""
    if isinstance(event, IntervalFailed):
        return f"this node contributes nothing to outer step {event.step}: {event.reason}", ""
    if isinstance(event, OtherHistory):
        return f"{run_id}: {event.words(short_id)}; this node keeps its own", event.remedy
    message = f"the invitation {event.serial} to {run_id} {event.reason}: it does not let this node in"
    return message, "ask the inviter for another invitation, and give it with --invitation"


def when_late(late_s: float | None) -> str:
    if late_s is None:
        return "was still being computed"
    late = f"{late_s:.1f}"
    if late == "0.0":
        return "was ready just as the round's group was formed without it"
    return f"came {late} s after the round's group was formed"


def ban_words(ban: Ban) -> str:
    return f"{short_id(ban.verdict.peer_id)} is banned {how_long(ban.until)}: {ban.verdict.reason}"


def awaited(waiting: Waiting) -> str:
    """Return what a member waits for: its disk, some of the peers by their short names, newcomers, or the result."""
    if waiting.is_for_disk:
        return "its own disk, which takes no vote,"
    peers = waiting.peers
    if not peers:
        return plural(waiting.num_lacking, "more member") if waiting.num_lacking else "the round's result"
    return first_few(peers, MAX_NAMED, short_id)
