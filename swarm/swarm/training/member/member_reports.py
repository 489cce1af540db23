"""The events that tell what becomes of one member, each when it changes.

What a step took is `progress_reports`. `RunMember` owns it; no tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from swarm_protocol.run_credentials import Grant
from swarm_protocol.training_messages import Endorsement

from swarm.training.evidence.bans import Ban
from swarm.training.round.round_events import GiveUp
from swarm.training.standing.entrance import Entry
from swarm.training.standing.held_out_scores import MICRO
from swarm.training.state.endorsement import contradicts
from swarm.training.state.replica import Replica
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import (
    ContributionLate,
    HeldOutScored,
    MemberConvicted,
    OnProbation,
    RoundAborted,
    RunEntered,
    StateEndorsed,
    TrainingEvent,
)

logger = logging.getLogger(__name__)


class MemberReports:
    """The reports of the member `peer_id`, which go to `on_event`. `grant` is what it shows where it enters the run."""

    def __init__(self, peer_id: str, on_event: Callable[[TrainingEvent], None]) -> None:
        self.grant: Grant | None = None
        self._peer_id = peer_id
        self._on_event = on_event
        self._steps_left = 0
        self._entry: Entry | None = None
        self._told_endorsement: Endorsement | None = None

    def probation(self, replica: Replica) -> None:
        """Report how many steps this member has to prove itself, and how it entered, whenever that changes."""
        steps_left = replica.standings.steps_left(self._peer_id, self.grant)
        if steps_left != self._steps_left:
            self._steps_left = steps_left
            self._on_event(OnProbation(step=replica.outer_step, steps_left=steps_left))
        entry = next((e for e in replica.standings.entries if e.peer_id == self._peer_id), None)
        if entry is not None and entry != self._entry:
            self._entry = entry
            self._on_event(RunEntered(step=entry.step, how=entry.how))

    def scores(self, replica: Replica) -> None:
        """Report the members' scores on held-out data, once there are any."""
        if scores := scores_of(replica):
            self._on_event(HeldOutScored(step=replica.outer_step, scores=scores, own=scores.get(self._peer_id)))

    def endorsed(self, context: RunContext) -> bool:
        """Report the author's newest endorsement, once. Return whether it was new."""
        endorsement = context.endorsements.newest
        if endorsement is None or endorsement == self._told_endorsement:
            return False
        self._told_endorsement = endorsement
        digest, is_other = endorsement.state_digest.hex(), contradicts(endorsement, context.replica.history)
        event = StateEndorsed(
            step=endorsement.outer_step, digest=digest, sequence=endorsement.sequence, is_other=is_other
        )
        self._on_event(event)
        return True

    def aborted(self, notice: GiveUp) -> None:
        """Report that an attempt was given up."""
        logger.warning("attempt %d at outer step %d: %s", notice.attempt, notice.step, notice.reason)
        self._on_event(
            RoundAborted(step=notice.step, attempt=notice.attempt, reason=notice.reason, missing=notice.missing)
        )

    def convicted(self, ban: Ban) -> None:
        """Report that evidence has convicted a member."""
        verdict = ban.verdict
        self._on_event(
            MemberConvicted(
                step=verdict.step, peer_id=verdict.peer_id, kind=verdict.kind, reason=verdict.reason, until=ban.until
            )
        )

    def late(self, event: ContributionLate) -> None:
        """Report that a group was formed before this member's contribution was ready."""
        when = "its interval still ran" if event.late_s is None else f"it was ready {event.late_s:.1f} s later"
        logger.warning("outer step %d was formed without this member's contribution: %s", event.step, when)
        self._on_event(event)


def scores_of(replica: Replica) -> dict[str, float]:
    """Return the trainers' scores in the committed state, in nats, by peer."""
    return {each.peer_id: each.value / MICRO for each in replica.current.state.held_out}
